/** What each chart has around it: title, the value under the cursor, a summary in words, and the data as a table. */

import { html, useId, useState } from "../core/html.js";
import { localTime } from "../core/format.js";
import { now } from "../core/api.js";

const ROWS = 60;

/**
 * @param {{
 *   title: string, hint?: string, summary: string, readout: any, columns: string[],
 *   rows: () => {at: string, cells: string[]}[], children: any,
 * }} props
 *   rows: newest last; called only while the table is open
 */
export function ChartFigure({ title, hint, summary, readout, columns, rows, children }) {
  const id = useId();
  const [open, setOpen] = useState(false);
  return html`<figure class="chart" role="group" aria-labelledby=${id}>
    <figcaption>
      <span id=${id} class="title">${title}</span>
      <span class="summary">${summary}</span>
      <span class="readout" aria-hidden="true" ref=${readout}></span>
      ${hint ? html`<span class="hint">${hint}</span>` : null}
    </figcaption>
    ${children}
    <details onToggle=${(event) => setOpen(event.currentTarget.open)}>
      <summary>As a table<span class="visually-hidden">: ${title}</span></summary>
      ${open ? html`<${Numbers} title=${title} columns=${columns} rows=${rows().slice(-ROWS).reverse()} />` : null}
    </details>
  </figure>`;
}

/** @param {{title: string, columns: string[], rows: {at: string, cells: string[]}[]}} props */
function Numbers({ title, columns, rows }) {
  return html`<div class="scroll numbers" tabindex="0" role="region" aria-label=${`${title} as a table`}>
    <table>
      <caption class="visually-hidden">${title}, newest first, at most ${ROWS} lines</caption>
      <thead><tr><th scope="col">Time</th>${columns.map((each) => html`<th scope="col" class="number">${each}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.at}>
        <th scope="row">${localTime(row.at, now())}</th>${row.cells.map((cell) => html`<td class="number">${cell}</td>`)}
      </tr>`)}</tbody>
    </table>
  </div>`;
}
