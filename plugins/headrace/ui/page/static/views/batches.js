/** The batches of a stream, a page at a time. The API sorts, filters and pages. */

import { streamPath, withQuery } from "../core/api.js";
import { ZONE, count, duration, fromField, toField, words } from "../core/format.js";
import { html } from "../core/html.js";
import { usePolled } from "../core/polling.js";
import { href, replaceQuery } from "../core/router.js";
import { Link } from "../parts/link.js";
import { Empty, WithData } from "../parts/messages.js";
import { NextTry } from "../parts/next_try.js";
import { StateBadge } from "../parts/state_badge.js";
import { Table } from "../parts/table.js";
import { Time } from "../parts/time.js";

const LIMIT = 50;
/** The API counts no further. */
const TOTAL_BOUND = 10_000;
const ORDERS = [["newest", "newest first"], ["oldest", "oldest first"], ["records", "most records"], ["processing_time", "longest processing"], ["total_delay", "longest total delay"]];

/** @param {{stream: any, query: Record<string, string>}} props */
export function Batches({ stream, query }) {
  const { state, order = "newest", from, until, cursor, page = "1" } = query;
  const polled = usePolled(withQuery(streamPath(stream.name, "batches"), { state, order, from, until, limit: LIMIT, cursor, folded: state === "absorbed" ? null : "true" }));
  const change = (given) => replaceQuery({ ...query, cursor: "", page: "", ...given });
  return html`<${WithData} polled=${polled} what="the batches">${(data) => {
    const states = Object.entries(data.total_by_state ?? {});
    // Batch times that a later batch took over are in that batch's line.
    const all = states.reduce((sum, [each, number]) => sum + (each === "absorbed" ? 0 : number), 0);
    return html`
      <div class="filters" role="search" aria-label="Filter the batches">
        <div class="chips" role="group" aria-label="State">
          ${[["", all], ...states].map(([each, number]) => html`<button type="button" key=${each} class="chip" aria-pressed=${(state ?? "") === each}
            onClick=${() => change({ state: each })}>${each ? words(each) : "all"} <b>${number >= TOTAL_BOUND ? `${count(TOTAL_BOUND)}+` : count(number)}</b></button>`)}
        </div>
        <label class="field"><span>Order</span><select value=${order} onChange=${(event) => change({ order: event.currentTarget.value })}>
          ${ORDERS.map(([value, name]) => html`<option key=${value} value=${value}>${name}</option>`)}</select></label>
        <${Moment} label="From" iso=${from} change=${(value) => change({ from: value })} />
        <${Moment} label="Until" iso=${until} change=${(value) => change({ until: value })} />
      </div>
      <${Table} caption=${`Batches of ${stream.name}, ${words(order)}`} columns=${columns(stream.name)} rows=${data.batches} keyOf=${(each) => each.batch_time}
        empty=${html`<${Empty} title="No batch matches the filter">${state || from || until ? html`<button type="button" onClick=${() => replaceQuery({})}>Show all</button>` : "The first one appears after one batch interval."}</${Empty}>`} />
      ${data.window ? html`<p class="quiet">Sorted among the newest ${count(data.window)} batches.</p>` : null}
      <nav class="pager" aria-label="Pages of batches">
        ${page !== "1" ? html`<a href=${href(["streams", stream.name, "batches"], { ...query, cursor: "", page: "" })}>First page</a>` : null}
        <span>Page ${page}</span>
        ${data.next_cursor ? html`<a rel="next" href=${href(["streams", stream.name, "batches"], { ...query, cursor: data.next_cursor, page: Number(page) + 1 })}>Next page</a>` : null}
      </nav>`;
  }}</${WithData}>`;
}

/** @param {string} name */
function columns(name) {
  return [
    { name: "Batch time", cell: (each) => html`<${Link} to=${["streams", name, "batches", each.batch_time]}><${Time} at=${each.batch_time} /></${Link}>${each.absorbed ? html`<div class="quiet">with ${count(each.absorbed)} since <${Time} at=${each.first_time} /></div>` : null}` },
    { name: "State", cell: (each) => html`<${StateBadge} state=${each.state} />` },
    { name: "Records", number: true, cell: (each) => count(each.records) },
    { name: "Scheduling delay", number: true, cell: (each) => duration(each.scheduling_delay) },
    { name: "Processing time", number: true, cell: (each) => duration(each.processing_time) },
    { name: "Total delay", number: true, cell: (each) => duration(each.total_delay) },
    { name: "Error", wide: true, cell: (each) => html`${each.error ? html`<span class="error clipped" title=${each.error}>${each.error}</span>` : null}<${NextTry} batch=${each} />` },
  ];
}

/** A field of date and time. @param {{label: string, iso?: string, change: (iso: string) => void}} props */
function Moment({ label, iso, change }) {
  const at = iso ? new Date(iso) : null;
  const value = at && !Number.isNaN(at.getTime()) ? toField(at) : "";
  return html`<label class="field"><span>${label} (${ZONE})</span><input type="datetime-local" value=${value} onChange=${(event) => change(fromField(event.currentTarget.value))} /></label>`;
}
