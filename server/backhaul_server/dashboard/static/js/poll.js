// Asks for what only one part of the page needs, while that part can be seen.

/** The answer of a route of the API. Raises Error with what the dashboard said. */
export async function ask(path, parameters = {}, signal = undefined) {
  const answer = await fetch(pathTo(path, parameters), { cache: "no-store", signal });
  if (answer.status === 401) location.assign("/login"); // the credential has expired while the page was open
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${answer.statusText}`);
  return answer.json();
}

/** A route with its query; parameters that are "" are left out. */
export function pathTo(path, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== undefined);
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

/**
 * Calls `refresh(signal)` every so often while a part is on screen and the tab is shown. The next call comes only after
 * the last one has ended; `now()` gives up the present one and begins anew, as after a click.
 */
export class Poll {
  constructor(section, intervalMs, refresh) {
    this.section = section;
    this.intervalMs = intervalMs;
    this.refresh = refresh;
    this.isVisible = false;
    this.controller = null;
    this.timer = 0;
    new IntersectionObserver(
      (entries) => {
        const wasVisible = this.isVisible;
        this.isVisible = entries.at(-1).isIntersecting;
        if (this.isVisible && !wasVisible) this.#begin();
      },
      { rootMargin: "240px 0px" },
    ).observe(section);
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.#begin();
    });
  }

  now() {
    this.controller?.abort();
    this.controller = null;
    this.#begin();
  }

  async #begin() {
    clearTimeout(this.timer);
    if (this.controller !== null || !this.isVisible || document.hidden) return;
    const controller = new AbortController();
    this.controller = controller;
    try {
      await this.refresh(controller.signal);
    } catch (error) {
      // What can't be had now is asked for again; that numbers get old is shown by the live part.
      if (!controller.signal.aborted) console.debug(error);
    }
    if (this.controller !== controller) return;
    this.controller = null;
    this.timer = setTimeout(() => this.#begin(), this.intervalMs);
  }
}
