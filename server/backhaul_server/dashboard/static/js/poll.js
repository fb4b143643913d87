// Polls the API for one part of the page while that part is visible.

/** Returns the answer of a route of the API. Throws an Error with the status that the dashboard answered. */
export async function ask(path, parameters = {}, signal = undefined) {
  const answer = await fetch(pathTo(path, parameters), { cache: "no-store", signal });
  if (answer.status === 401) location.assign("/login"); // the credential has expired while the page was open
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${answer.statusText}`);
  return answer.json();
}

/** Returns a route with its query, without the parameters that are "". */
export function pathTo(path, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== undefined);
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

/**
 * Calls `refresh(signal)` at an interval while a part is on screen and the tab is visible. Each call begins only after
 * the last one has ended. `now()` aborts the present call and begins a new one, as after a click.
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
      // The next poll repeats the request. The live part shows how old the numbers are.
      if (!controller.signal.aborted) console.debug(error);
    }
    if (this.controller !== controller) return;
    this.controller = null;
    this.timer = setTimeout(() => this.#begin(), this.intervalMs);
  }
}
