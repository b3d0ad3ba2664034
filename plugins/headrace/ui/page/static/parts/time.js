/** Times: in the zone chosen in Airflow, with UTC in the title. */

import { now } from "../core/api.js";
import { UNKNOWN, duration, localTime, utc } from "../core/format.js";
import { html } from "../core/html.js";

/** @param {{at: string | null}} props */
export function Time({ at }) {
  return at ? html`<time datetime=${at} title=${utc(at)}>${localTime(at, now())}</time>` : UNKNOWN;
}

/** How long ago. @param {{at: string | null}} props */
export function Ago({ at }) {
  if (!at) return UNKNOWN;
  const seconds = (now() - Date.parse(at)) / 1000;
  const text = Math.abs(seconds) < 1 ? "now" : seconds < 0 ? `in ${duration(Math.round(-seconds))}` : `${duration(Math.round(seconds))} ago`;
  return html`<time datetime=${at} title=${`${localTime(at, now())} (${utc(at)})`}>${text}</time>`;
}
