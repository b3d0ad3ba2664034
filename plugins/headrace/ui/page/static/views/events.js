/** What happened to the stream, newest first. */

import { get, streamPath, withQuery } from "../core/api.js";
import { words } from "../core/format.js";
import { html, useState } from "../core/html.js";
import { usePolled } from "../core/polling.js";
import { replaceQuery } from "../core/router.js";
import { Link } from "../parts/link.js";
import { Empty, Problem, WithData } from "../parts/messages.js";
import { Table } from "../parts/table.js";
import { Time } from "../parts/time.js";
import { Words } from "../parts/words.js";

const LIMIT = 100;
/** The kinds that a person looks for; an event's own kind filters too, by a click. */
const KINDS = ["stream_state_changed", "receiver_error", "receiver_failed", "job_failed", "receiving_paused", "batch_failed", "output_failed", "dead_letters", "batch_abandoned", "output_abandoned", "partition_failed", "gap", "log_damaged"];

/** @param {{stream: any, query: Record<string, string>}} props */
export function Events({ stream, query }) {
  const kind = query.kind ?? "";
  const path = streamPath(stream.name, "events");
  const polled = usePolled(withQuery(path, { kind, limit: LIMIT }));
  const kinds = kind && !KINDS.includes(kind) ? [...KINDS, kind] : KINDS;
  return html`
    <label class="field"><span>Kind</span><select value=${kind} onChange=${(event) => replaceQuery({ kind: event.currentTarget.value })}>
      <option value="">all</option>${kinds.map((each) => html`<option key=${each} value=${each}>${words(each)}</option>`)}</select></label>
    <${WithData} polled=${polled} what="the events">${(data) => html`<${Lines} key=${kind} stream=${stream} newest=${data} path=${path} kind=${kind} />`}</${WithData}>`;
}

/** @param {{stream: any, newest: any, path: string, kind: string}} props */
function Lines({ stream, newest, path, kind }) {
  const [older, setOlder] = useState({ events: /** @type {any[]} */ ([]), next: /** @type {number | null | undefined} */ (undefined), error: null });
  const known = new Set(newest.events.map((each) => each.id));
  const next = older.next === undefined ? newest.next_before_id : older.next;
  const shown = [...newest.events, ...older.events.filter((each) => !known.has(each.id))];
  async function more() {
    try {
      const page = await get(path, { kind, limit: LIMIT, before_id: shown.at(-1).id });
      setOlder((old) => ({ events: [...old.events, ...page.events], next: page.next_before_id, error: null }));
    } catch (error) {
      setOlder((old) => ({ ...old, error }));
    }
  }
  return html`<${Table} caption=${`Events of ${stream.name}, newest first`} columns=${columns(stream.name)} rows=${shown} keyOf=${(each) => each.id}
      empty=${html`<${Empty} title=${kind ? "No event of this kind" : "No event yet"} />`} />
    ${older.error ? html`<${Problem} error=${older.error} />` : null}
    ${next != null ? html`<button type="button" onClick=${more}>Older events</button>` : null}`;
}

/** @param {string} name */
function columns(name) {
  return [
    { name: "Time", cell: (each) => html`<${Time} at=${each.at} />` },
    { name: "Kind", cell: (each) => words(each.kind) },
    { name: "Batch", cell: (each) => (each.batch_time ? html`<${Link} to=${["streams", name, "batches", each.batch_time]}><${Time} at=${each.batch_time} /></${Link}>` : null) },
    { name: "What", wide: true, cell: (each) => html`<${Words} text=${each.text} /><${Details} payload=${each.payload} />` },
  ];
}

/** @param {{payload: Record<string, any>}} props */
export function Details({ payload }) {
  const given = Object.entries(payload).filter(([, value]) => value !== null && value !== "");
  return html`<span class="details">${given.map(([name, value]) => html`<span key=${name}><span class="quiet">${words(name)}</span> ${typeof value === "object" ? JSON.stringify(value) : String(value)}</span>`)}</span>`;
}
