// The live events of the dashboard, one per second, and the age of the last one.

const STALE_MS = 3000;
const DEAD_MS = 8000;
const REOPEN_MS = 1000;

/**
 * Follows /api/v1/live as long as the page is open. A hidden tab makes no requests.
 *
 * @param {(live: object) => void} onLive called with each event
 * @param {(ageS: number | null) => void} onAge called four times a second with the seconds since the last event, or
 *   with null while that event is recent
 */
export function follow(onLive, onAge) {
  let source = null;
  let heardMs = null;
  let openedMs = 0;

  const open = () => {
    source?.close();
    openedMs = performance.now();
    source = new EventSource("api/v1/live");
    source.addEventListener("live", (event) => {
      heardMs = performance.now();
      onLive(JSON.parse(event.data));
      onAge(null);
    });
  };

  setInterval(() => {
    if (document.hidden) return;
    const now = performance.now();
    // EventSource reconnects by itself, but not if the answer is no stream, or if the connection hangs.
    const waitedMs = now - Math.max(heardMs ?? 0, openedMs);
    if (source.readyState === EventSource.CLOSED ? waitedMs > REOPEN_MS : waitedMs > DEAD_MS) open();
    if (heardMs === null ? now > STALE_MS : now - heardMs > STALE_MS) onAge((now - (heardMs ?? 0)) / 1000);
  }, 250);

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) source.close();
    else open();
  });
  open();
}
