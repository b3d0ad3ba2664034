/** Numbers, durations and times as words. A value that is not known is "–". */

export const UNKNOWN = "–";

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });

/** The zone of all times on the page: the one chosen in Airflow, which keeps it in this origin's storage, else the browser's. */
export const ZONE = chosenZone() ?? Intl.DateTimeFormat().resolvedOptions().timeZone;

/** @returns {string | null} */
function chosenZone() {
  try {
    const zone = JSON.parse(localStorage.getItem("timezone") ?? "null");
    return zone && new Intl.DateTimeFormat(undefined, { timeZone: zone }).resolvedOptions().timeZone;
  } catch {
    return null;
  }
}

/** @param {Intl.DateTimeFormatOptions} fields */
function inZone(fields) {
  return new Intl.DateTimeFormat(undefined, { ...fields, hourCycle: "h23", timeZone: ZONE });
}

const clock = inZone({ hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = inZone({ year: "numeric", month: "short", day: "numeric" });
const dayAndClock = inZone({ year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" });
const axisDay = inZone({ month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });

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
 * The time in `ZONE`; with the day if it is not today.
 *
 * @param {string | number} time  ISO 8601, or milliseconds since the epoch
 * @param {number} nowMs
 */
export function localTime(time, nowMs) {
  const at = new Date(time);
  return day.format(at) === day.format(new Date(nowMs)) ? clock.format(at) : dayAndClock.format(at);
}

/** A time on an axis; with the day if the axis is longer than half a day. @param {number} seconds @param {number} length  seconds */
export function axisTime(seconds, length) {
  return (length > 43_200 ? axisDay : clock).format(new Date(seconds * 1000));
}

const FIELDS = new Intl.DateTimeFormat("en-CA", {
  timeZone: ZONE, hourCycle: "h23", year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit",
});

/** The value of a field of date and time, in `ZONE`. @param {Date} at */
export function toField(at) {
  const part = Object.fromEntries(FIELDS.formatToParts(at).map((each) => [each.type, each.value]));
  return `${part.year}-${part.month}-${part.day}T${part.hour}:${part.minute}`;
}

/** The time that such a value means; "" if it is none. @param {string} value */
export function fromField(value) {
  const asUtc = Date.parse(`${value}Z`);
  if (Number.isNaN(asUtc)) return "";
  // The zone's distance from UTC at about that time; the second step is for a change of it in between.
  const offset = (ms) => Date.parse(`${toField(new Date(ms))}Z`) - Math.floor(ms / 60_000) * 60_000;
  return new Date(asUtc - offset(asUtc - offset(asUtc))).toISOString();
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
