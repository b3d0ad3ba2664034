/** Names and values in a row, as a description list. */

import { html } from "../core/html.js";

/** @param {{facts: [string, any][]}} props  facts whose value is null are left out */
export function Facts({ facts }) {
  return html`<dl class="facts">${facts.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => html`
    <div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}
