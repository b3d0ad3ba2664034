/** When the repair tries an unfinished batch again. */

import { html } from "../core/html.js";
import { Time } from "./time.js";

/** @param {{batch: {next_try: string | null, tried_again: string | null}}} props */
export function NextTry({ batch }) {
  if (!batch.tried_again) return null;
  // The text has the time in UTC.
  const later = batch.next_try && batch.tried_again !== "now";
  return html`<div class="quiet">The repair tries it again ${later ? html`at <${Time} at=${batch.next_try} />` : batch.tried_again}.</div>`;
}
