/** The size of the log, and which batches keep it from being deleted. */

import { bytes, count } from "../core/format.js";
import { html } from "../core/html.js";
import { Facts } from "../parts/facts.js";
import { Link } from "../parts/link.js";
import { Empty } from "../parts/messages.js";
import { StateBadge } from "../parts/state_badge.js";
import { Table } from "../parts/table.js";
import { Time } from "../parts/time.js";
import { Words } from "../parts/words.js";

/** @param {{stream: any}} props */
export function Log({ stream }) {
  const { log } = stream;
  if (!log) return html`<${Empty} title="Nothing is known of the log yet" />`;
  const share = log.limit_bytes ? log.bytes / log.limit_bytes : null;
  return html`
    <${Facts} facts=${[
      ["Size", bytes(log.bytes)], ["Limit", log.limit_bytes == null ? "none" : bytes(log.limit_bytes)],
      ["Used", share === null ? null : html`<meter min="0" max="1" high="0.8" value=${share} aria-label="Share of the limit"></meter> ${Math.round(share * 100)} %`],
      ["Segments", count(log.segments)],
    ]} />
    <h2>What holds it</h2>
    <p class="quiet">A segment is deleted when each batch that needs it is completed and checkpointed, or was abandoned.</p>
    <${Table} caption="Batches that hold files of the log" columns=${columns(stream.name)} rows=${log.held_by ?? []} keyOf=${(each) => each.batch_time}
      empty=${html`<${Empty} title="No unfinished batch holds the log" />`} />`;
}

/** @param {string} name */
function columns(name) {
  return [
    { name: "Batch time", cell: (each) => html`<${Link} to=${["streams", name, "batches", each.batch_time]}><${Time} at=${each.batch_time} /></${Link}>` },
    { name: "State", cell: (each) => html`<${StateBadge} state=${each.state} />` },
    { name: "Size", number: true, cell: (each) => bytes(each.bytes) },
    { name: "Why", wide: true, cell: (each) => html`<${Words} text=${each.reason} />` },
  ];
}
