// What the dashboard says once a second, and how old it is.

const STALE_MS = 3000;
const DEAD_MS = 8000;
const REOPEN_MS = 1000;

/**
 * Follows /api/v1/live for as long as the page is open; a hidden tab asks for nothing.
 *
 * @param {(live: object) => void} onLive with each event
 * @param {(ageS: number | null) => void} onAge four times a second: seconds since the last event once that is
 *   stale, null while it is not
 */
export function follow(onLive, onAge) {
  let source = null;
  let heardMs = null;
  let openedMs = 0;

  const open = () => {
    source?.close();
    openedMs = performance.now();
    source = new EventSource("/api/v1/live");
    source.addEventListener("live", (event) => {
      heardMs = performance.now();
      onLive(JSON.parse(event.data));
      onAge(null);
    });
  };

  setInterval(() => {
    if (document.hidden) return;
    const now = performance.now();
    // EventSource reconnects by itself, but not after an answer that is no stream, nor on a connection that hangs.
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
