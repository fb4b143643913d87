// Polls the API for one part of the page while that part is visible.

/** A request that the dashboard has refused, with the status and with its sentence on why. */
export class RefusedError extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

/** Returns the answer of a route of the API. Throws a RefusedError if the dashboard answers with another status than 200. */
export async function ask(path, parameters = {}, signal = undefined) {
  const answer = await fetch(pathTo(path, parameters), { cache: "no-store", signal });
  if (answer.status === 401) location.assign("login"); // the credential has expired while the page was open
  if (!answer.ok) throw new RefusedError(answer.status, await sentenceOf(answer));
  return answer.json();
}

async function sentenceOf(answer) {
  const text = await answer.text();
  try {
    const { detail } = JSON.parse(text);
    return typeof detail === "string" ? detail : detail.map((one) => one.msg).join("; ");
  } catch {
    return `${answer.status} ${answer.statusText}`; // a proxy in between answers in its own words
  }
}

/** Returns a route with its query, without the parameters that are "". A list becomes one parameter for each item. */
export function pathTo(path, parameters) {
  const given = Object.entries(parameters)
    .flatMap(([name, value]) => (Array.isArray(value) ? value.map((one) => [name, one]) : [[name, value]]))
    .filter(([, value]) => value !== "" && value !== undefined);
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

const polls = [];
let isAllShown = false;

/**
 * Has every part polled, whether or not it is on screen: before the page is printed or pictured as a whole. Resolves once
 * each part has had its answer, or has failed to get one.
 */
export async function loadAll() {
  isAllShown = true;
  await Promise.all(polls.map((poll) => poll.loaded()));
}

/** Has only the parts on screen polled again. */
export function loadSeen() {
  isAllShown = false;
}

/**
 * Calls `refresh(signal)` at an interval while a part is on screen and the tab is visible. Each call begins only after
 * the last one has ended. `now()` aborts the present call and begins a new one, as after a click and after what one of
 * `events` calls back for, such as `onRange`. `onRefused(sentence)` is called when the dashboard refuses a request, for
 * example because it does not know the chosen run.
 */
export class Poll {
  constructor(section, intervalMs, refresh, { events = [], onRefused = () => {} } = {}) {
    this.section = section;
    this.intervalMs = intervalMs;
    this.refresh = refresh;
    this.onRefused = onRefused;
    this.isVisible = false;
    this.controller = null;
    this.timer = 0;
    this.waiting = []; // called when the next request has ended
    polls.push(this);
    for (const onEvent of events) onEvent(() => this.now());
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

  /** Resolves when a request that begins now, or is in progress, has ended. */
  loaded() {
    return new Promise((resolve) => {
      this.waiting.push(resolve);
      this.#begin();
    });
  }

  now() {
    this.controller?.abort();
    this.controller = null;
    this.#begin();
  }

  async #begin() {
    clearTimeout(this.timer);
    if (this.controller !== null || !(this.isVisible || isAllShown) || document.hidden) return;
    const controller = new AbortController();
    this.controller = controller;
    try {
      await this.refresh(controller.signal);
    } catch (error) {
      // The next poll repeats the request. The live part shows how old the numbers are.
      if (!controller.signal.aborted) console.debug(error);
      if (error instanceof RefusedError) this.onRefused(error.message);
    }
    if (this.controller !== controller) return;
    this.controller = null;
    for (const resolve of this.waiting.splice(0)) resolve();
    this.timer = setTimeout(() => this.#begin(), this.intervalMs);
  }
}
