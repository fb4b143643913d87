// Formats numbers for people, always with their unit.

export const NONE = "–";
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const MINUS = "\u2212";

/** Formats bytes with three digits: 1536 becomes "1.50 KiB". */
export function bytes(count) {
  if (count === null || count === undefined) return NONE;
  let value = Math.abs(count);
  let unit = 0;
  while (value >= 1023.5 && unit < BYTE_UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${count < 0 ? MINUS : ""}${unit === 0 ? Math.round(value) : threeDigits(value)} ${BYTE_UNITS[unit]}`;
}

/** Formats 0.0421 as "0.042", 4.213 as "4.21", 42.13 as "42.1", 421.3 as "421" and 4213 as "4,213". */
export function threeDigits(value) {
  const size = Math.abs(value);
  const digits = size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.1 || size === 0 ? 2 : 3;
  const text = size.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return value < 0 && Number(text) !== 0 ? MINUS + text : text;
}

/** Formats milliseconds: in ms below one second, in s from there on. */
export function milliseconds(value) {
  if (value === null || value === undefined) return NONE;
  return Math.abs(value) < 1000 ? `${threeDigits(value)} ms` : `${threeDigits(value / 1000)} s`;
}

/** Formats a difference in milliseconds with its sign: "+62.0 ms". */
export function signedMilliseconds(value) {
  return value > 0 ? `+${milliseconds(value)}` : milliseconds(value);
}

/** Formats the offset of a clock with the bound of its error: "+0.21 ± 0.05 ms". */
export function offset(ms, errorMs) {
  if (ms === null || ms === undefined) return NONE;
  const digits = errorMs < 0.1 ? 3 : errorMs < 10 ? 2 : 0;
  return `${ms < 0 ? MINUS : "+"}${Math.abs(ms).toFixed(digits)} ± ${errorMs.toFixed(digits)} ms`;
}

/** Formats a part of a whole: "35.0 of 80.0 GiB", or "512 MiB of 80.0 GiB". */
export function bytesOf(part, whole) {
  const [, unit] = bytes(whole).split(" ");
  return `${bytes(part).replace(` ${unit}`, "")} of ${bytes(whole)}`;
}

/** Formats a rate: "12.0 MiB/s". */
export function rate(perS) {
  return perS === null || perS === undefined ? NONE : `${bytes(perS)}/s`;
}

/** Formats a duration or an age: "4 s", "12 min", "3.2 h", "5 d". */
export function duration(seconds) {
  const value = Math.max(0, seconds);
  if (value < 99.5) return `${Math.round(value)} s`;
  if (value < 99.5 * 60) return `${Math.round(value / 60)} min`;
  if (value < 48 * 3600) return `${(value / 3600).toFixed(1)} h`;
  return `${Math.round(value / 86400)} d`;
}

/** Formats how long ago a time was, by a clock of the same machine: "4 min ago". */
export function ago(atS, nowS) {
  return `${duration(nowS - atS)} ago`;
}

export function count(value) {
  return value === null || value === undefined ? NONE : value.toLocaleString("en");
}

/**
 * Formats 0.02 as "2 %" and 0.9983 as "99.8 %". A share between none and all is never rounded to either. Sentences of the
 * API have the same format, by in_percent of collect/percentages.py.
 */
export function percent(share) {
  if (share === null || share === undefined) return NONE;
  const rounded = Math.round(1000 * share) / 10;
  return `${share > 0 && share < 1 ? Math.min(99.9, Math.max(0.1, rounded)) : rounded} %`;
}

export function loss(value) {
  return value === null || value === undefined ? NONE : value.toFixed(4);
}

/** Formats a relative difference; 0 means equal bits. */
export function drift(value) {
  return value === 0 ? "0" : value.toExponential(1).replace("-", MINUS);
}

/** Formats the time of day in 24 hours, in the viewer's time zone. */
export function clock(atS) {
  return new Date(atS * 1000).toLocaleTimeString("en-GB");
}

/** Formats a time as "25 Nov 13:02", or to the second as "25 Nov 13:02:10". */
export function date(atS, isExact = false) {
  const at = new Date(atS * 1000);
  const day = at.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  const time = isExact ? clock(atS) : at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  return `${day} ${time}`;
}

/** Shortens the random id of a run to its first letters, which identify it well enough. */
export function runName(run) {
  return run.slice(0, 8);
}
