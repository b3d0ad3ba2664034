/** A table that scrolls sideways on a narrow screen, also by keyboard. */

import { html } from "../core/html.js";

/**
 * @typedef {object} Column
 * @property {string} name
 * @property {(row: any) => any} cell
 * @property {boolean} [number]  aligned to the right
 * @property {boolean} [wide]    takes the room that is left, and breaks lines
 */

/** @param {{caption: string, columns: Column[], rows: any[], keyOf: (row: any, index: number) => string | number, empty?: any}} props */
export function Table({ caption, columns, rows, keyOf, empty = null }) {
  if (!rows.length) return empty;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption class="visually-hidden">${caption}</caption>
      <thead><tr>${columns.map((each) => html`<th key=${each.name} scope="col" class=${kind(each)}>${each.name}</th>`)}</tr></thead>
      <tbody>${rows.map((row, index) => html`<tr key=${keyOf(row, index)}>
        ${columns.map((each, column) => (column === 0
          ? html`<th key=${each.name} scope="row" class=${kind(each)}>${each.cell(row)}</th>`
          : html`<td key=${each.name} class=${kind(each)}>${each.cell(row)}</td>`))}
      </tr>`)}</tbody>
    </table>
  </div>`;
}

/** @param {Column} column */
function kind(column) {
  return column.number ? "number" : column.wide ? "wide" : undefined;
}
