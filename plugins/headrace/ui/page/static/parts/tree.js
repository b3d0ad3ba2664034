/** An answer of the API as nested names and values. */

import { html } from "../core/html.js";
import { words } from "../core/format.js";
import { Time } from "./time.js";

const ISO = /^\d{4}-\d\d-\d\dT[\d:.]+Z$/;

/** @param {{value: any}} props */
export function Tree({ value }) {
  if (Array.isArray(value)) return value.length ? html`<ol class="tree">${value.map((each, index) => html`<li key=${index}><${Tree} value=${each} /></li>`)}</ol>` : "none";
  if (value && typeof value === "object") {
    return html`<dl class="tree">${Object.entries(value).filter(([, each]) => each !== null).map(([name, each]) => html`
      <div key=${name}><dt>${words(name)}</dt><dd><${Tree} value=${each} /></dd></div>`)}</dl>`;
  }
  if (typeof value === "string" && ISO.test(value)) return html`<${Time} at=${value} />`;
  if (value === true || value === false) return value ? "yes" : "no";
  return value === null ? "–" : String(value);
}
