/** Numbers, durations and times as words. A value that is not known is "–". */

export const UNKNOWN = "–";

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const dayAndClock = new Intl.DateTimeFormat(undefined, {
  year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});

/** @param {number | null | undefined} value */
export function count(value) {
  return value == null ? UNKNOWN : whole.format(value);
}

/** @param {number | null | undefined} value  per second */
export function rate(value) {
  if (value == null) return UNKNOWN;
  return `${value < 10 ? tenth.format(value) : whole.format(value)}/s`;
}

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds == null) return UNKNOWN;
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1) return `${whole.format(seconds * 1000)} ms`;
  if (size < 60) return `${tenth.format(seconds)} s`;
  if (size < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (size < 172_800) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} days`;
}

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (value == null) return UNKNOWN;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let size = value, unit = 0;
  while (size >= 1000 && unit < units.length - 1) { size /= 1000; unit += 1; }
  return `${size < 10 && unit ? tenth.format(size) : whole.format(size)} ${units[unit]}`;
}

/**
 * Local time; with the day if it is not today.
 *
 * @param {string | number} time  ISO 8601, or milliseconds since the epoch
 * @param {number} nowMs
 */
export function localTime(time, nowMs) {
  const at = new Date(time);
  return at.toDateString() === new Date(nowMs).toDateString() ? clock.format(at) : dayAndClock.format(at);
}

/** @param {string | number} time */
export function utc(time) {
  const at = new Date(time);
  return Number.isNaN(at.getTime()) ? String(time) : at.toISOString().replace("T", " ").replace("Z", " UTC");
}

/** A name of the API in words: "falling_behind" is "falling behind". @param {string} name */
export function words(name) {
  return String(name).replaceAll("_", " ");
}
