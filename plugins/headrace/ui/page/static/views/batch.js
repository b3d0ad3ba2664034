/** One batch: what it holds, what was tried, what each output has. */

import { streamPath } from "../core/api.js";
import { bytes, count, duration, words } from "../core/format.js";
import { html } from "../core/html.js";
import { usePolled } from "../core/polling.js";
import { Action } from "../parts/action.js";
import { Facts } from "../parts/facts.js";
import { Link, OutsideLink } from "../parts/link.js";
import { Empty, WithData } from "../parts/messages.js";
import { NextTry } from "../parts/next_try.js";
import { StateBadge } from "../parts/state_badge.js";
import { Table } from "../parts/table.js";
import { Time } from "../parts/time.js";
import { Words } from "../parts/words.js";
import { PHASES } from "../parts/phases.js";
import { Details } from "./events.js";

/** @param {{stream: any, batchTime: string, refresh: () => void}} props */
export function Batch({ stream, batchTime, refresh }) {
  const polled = usePolled(streamPath(stream.name, "batches", batchTime));
  const both = () => { polled.refresh(); refresh(); };
  return html`<section class="batch" aria-label="Batch"><${WithData} polled=${polled} what="the batch">${(batch) => html`
    <${Head} stream=${stream} batch=${batch} refresh=${both} />
    <h2>Outputs</h2>
    <${Table} caption="Outputs" columns=${OUTPUTS} rows=${batch.outputs ?? []} keyOf=${(each) => `${each.target} ${each.id}`} empty=${html`<${Empty} title="No output has been tried yet" />`} />
    <h2>Attempts</h2>
    <${Table} caption="Attempts" columns=${ATTEMPTS} rows=${batch.all_attempts ?? []} keyOf=${(each) => each.number} empty=${html`<${Empty} title="No attempt yet" />`} />
    <h2>Ranges</h2>
    <${Table} caption="Offset ranges" columns=${RANGES} rows=${batch.ranges ?? []} keyOf=${(each, index) => index} empty=${html`<${Empty} title="The batch has no records" />`} />
    <h2>Events</h2>
    <${Table} caption="Events of the batch" columns=${EVENTS} rows=${batch.events ?? []} keyOf=${(each) => each.id} empty=${html`<${Empty} title="No event" />`} />
    <${Blocks} batch=${batch} />`}</${WithData}></section>`;
}

/** @param {{stream: any, batch: any, refresh: () => void}} props */
function Head({ stream, batch, refresh }) {
  const of = (verb) => streamPath(stream.name, "batches", batch.batch_time, verb);
  const permitted = stream.may?.operate === true;
  const { links = {} } = batch;
  return html`
    <div class="headline">
      <h1 tabindex="-1">Batch <${Time} at=${batch.batch_time} /></h1><${StateBadge} state=${batch.state} large />
      <div class="buttons">
        <${Action} label="Run again" title="Run this batch again" path=${of("run")} done=${refresh} permitted=${permitted} fields=${[{ name: "reason", label: "Reason, for the events" }]} />
        <${Action} label="Replay into another index" title="Replay this batch by another DAG" path=${of("replay")} done=${refresh} permitted=${permitted && Boolean(stream.replay_dag_ids?.length)}
          notPermitted=${permitted ? "There is no replay DAG of this stream: make one with replay_dag()." : undefined}
          fields=${[{ name: "target", label: "Replay DAG", choices: stream.replay_dag_ids ?? [] }]} />
        <${Action} label="Abandon" title="Abandon this batch" path=${of("abandon")} done=${refresh} permitted=${permitted && batch.state !== "completed"}
          notPermitted=${permitted ? "This batch has completed: there is nothing to give up." : undefined}
          fields=${[{ name: "reason", label: "Reason", required: true }]} danger />
      </div>
    </div>
    ${batch.error ? html`<div class="verdict failing"><${Folded} text=${batch.error} /></div>` : null}
    <${NextTry} batch=${batch} />
    <p class="links"><${OutsideLink} url=${links.run}>Run in Airflow</${OutsideLink}> <${OutsideLink} url=${links.logs}>Logs</${OutsideLink}>
      <${OutsideLink} url=${links.grid}>Grid</${OutsideLink}> <${OutsideLink} url=${links.spark_ui}>Spark's page</${OutsideLink}></p>
    <${Facts} facts=${[
      ["Records", count(batch.records)], ["Size", bytes(batch.bytes)], ["Scheduling delay", duration(batch.scheduling_delay)],
      ["Processing time", duration(batch.processing_time)], ["Total delay", duration(batch.total_delay)],
      ...PHASES.map(([name]) => [words(name), batch.phases?.[name] == null ? null : duration(batch.phases[name])]),
      ["Built from Kafka", batch.built ? "yes, by timestamps" : null], ["Late records", batch.late_records ? count(batch.late_records) : null],
      ["After its failure", batch.became],
      ["Took over", batch.absorbed ? `${count(batch.absorbed)} earlier batch times` : null],
      ["Taken over by", batch.absorbed_by ? html`<${Link} to=${["streams", stream.name, "batches", batch.absorbed_by]}><${Time} at=${batch.absorbed_by} /></${Link}>` : null],
      ["Allocated", html`<${Time} at=${batch.allocated_at} />`], ["Started", html`<${Time} at=${batch.started_at} />`], ["Completed", html`<${Time} at=${batch.completed_at} />`],
      ["A new run reads its records from", batch.where === "removed" ? "nowhere: they are removed" : batch.where], ["Code", batch.code_version], ["Definition", batch.revision == null ? null : html`revision ${batch.revision}`],
      ["Manifest", batch.manifest ? html`<code>${batch.manifest}</code>` : null],
    ]} />`;
}

/** A long error: its first two lines, the rest folded. @param {{text: string}} props */
function Folded({ text }) {
  const lines = text.split("\n");
  const first = lines.slice(0, 2).join("\n");
  if (lines.length <= 2) return html`<p class="reason">${text}</p>`;
  return html`<p class="reason">${first}</p><details class="whole"><summary>The whole error</summary><pre>${text}</pre></details>`;
}

/** @param {{batch: any}} props */
function Blocks({ batch }) {
  const { blocks, block_count: total } = batch;
  if (!blocks.length) return null;
  return html`<details class="blocks"><summary><h2>${count(total)} blocks in the log</h2></summary>
    ${total > blocks.length ? html`<p class="quiet">The first ${count(blocks.length)} are shown.</p>` : null}
    <${Table} caption="Blocks" columns=${BLOCKS} rows=${blocks} keyOf=${(each) => each.id} /></details>`;
}

const ERROR = { name: "Error", wide: true, cell: (each) => html`${each.error ? html`<span class="error">${each.error}</span>` : null}${each.warning ? html`<div class="quiet">${each.warning}</div>` : null}` };
const OUTPUTS = [
  { name: "Output", cell: (each) => html`${each.id}${each.target ? html`<div class="quiet">replay ${each.target}</div>` : null}` },
  { name: "State", cell: (each) => html`<${StateBadge} state=${each.state} />` },
  ERROR,
  { name: "Kind", cell: (each) => each.kind ?? "–" },
  { name: "Counts", wide: true, cell: (each) => html`<${Details} payload=${Object.fromEntries(Object.entries(each.counts ?? {}).map(([name, value]) => [name, typeof value === "number" ? count(value) : value]))} />${each.throttled ? html`<div class="quiet">${each.throttled}</div>` : null}` },
  { name: "Retries", number: true, cell: (each) => count(each.retries) },
];
const ATTEMPTS = [
  { name: "Attempt", cell: (each) => html`${each.number}${each.target ? html`<div class="quiet">replay ${each.target}</div>` : null}` },
  { name: "State", cell: (each) => html`<${StateBadge} state=${each.state} />` },
  ERROR,
  { name: "Started", cell: (each) => html`<${Time} at=${each.started_at} />` },
  { name: "Ended", cell: (each) => html`<${Time} at=${each.ended_at} />` },
  { name: "Outputs", cell: (each) => each.outputs.join(", ") },
  { name: "Took", number: true, cell: (each) => duration(each.duration) },
  { name: "By", cell: (each) => html`${each.holder}<div class="quiet">${each.way}, records from ${each.source}</div>` },
  { name: "Code", cell: (each) => html`${each.code_version ?? "–"}${each.revision == null ? null : html`<div class="quiet">revision ${each.revision}</div>`}` },
  { name: "Links", cell: (each) => html`<${OutsideLink} url=${each.links?.logs}>Logs</${OutsideLink}> <${OutsideLink} url=${each.links?.spark_ui}>Spark</${OutsideLink}>` },
];
const RANGES = [
  { name: "Topic", cell: (each) => each.topic },
  { name: "Input", cell: (each) => each.input },
  { name: "Partition", number: true, cell: (each) => each.partition },
  { name: "From offset", number: true, cell: (each) => count(each.from_offset) },
  { name: "Until (not included)", number: true, cell: (each) => count(each.until_offset) },
  { name: "Records", number: true, cell: (each) => count(each.records) },
];
const BLOCKS = [
  { name: "Block", cell: (each) => each.id },
  { name: "Cut", cell: (each) => html`<${Time} at=${each.cut_at} />` },
  { name: "Receiver", cell: (each) => `${each.receiver} of ${each.input}, epoch ${each.epoch}` },
  { name: "Segment", cell: (each) => html`<code>${each.segment}</code>` },
  { name: "Records", number: true, cell: (each) => count(each.records) },
  { name: "Size", number: true, cell: (each) => bytes(each.bytes) },
];
const EVENTS = [
  { name: "Time", cell: (each) => html`<${Time} at=${each.at} />` },
  { name: "Kind", cell: (each) => words(each.kind) },
  { name: "What", wide: true, cell: (each) => html`<${Words} text=${each.text} /><${Details} payload=${each.payload} />` },
];
