/** The receiver job, its receivers, the partitions that they read, and its listeners. */

import { bytes, count, rate } from "../core/format.js";
import { html } from "../core/html.js";
import { Facts } from "../parts/facts.js";
import { OutsideLink } from "../parts/link.js";
import { Empty } from "../parts/messages.js";
import { StateBadge } from "../parts/state_badge.js";
import { Table } from "../parts/table.js";
import { Ago, Time } from "../parts/time.js";

/** @param {{stream: any}} props */
export function Receivers({ stream }) {
  const { receiver_job: job, receivers = [], partitions = [], listeners = [] } = stream;
  const highest = Math.max(1, ...partitions.map((each) => each.lag ?? 0));
  return html`
    <h2>Receiver job</h2>
    ${job ? html`<${Facts} facts=${[
      ["State", html`<${StateBadge} state=${job.state} />`], ["Since", html`<${Ago} at=${job.since} />`], ["Host", job.host], ["Held by", job.holder],
      ["Epoch", job.epoch], ["Code", job.code_version], ["Error", job.error ? html`<span class="error">${job.error}</span>` : null], ["Spark", job.spark_ui ? html`<${OutsideLink} url=${job.spark_ui}>Spark's page</${OutsideLink}>` : null],
      ["Log file", job.log_path ? html`<code>${job.log_path}</code>` : null],
    ]} />` : html`<${Empty} title="There is no receiver job">The DAG <code>${stream.receiver_dag_id}</code> starts it: is it unpaused?</${Empty}>`}
    <h2>Receivers</h2>
    <${Table} caption="Receivers" columns=${RECEIVERS} rows=${receivers} keyOf=${(each) => each.id} empty=${html`<${Empty} title="There is no receiver">They start with the receiver job.</${Empty}>`} />
    <h2>Lag by partition</h2>
    <${Table} caption="Partitions, with their lag" columns=${partitionColumns(highest, partitions.some((each) => each.watermark))} rows=${[...partitions].sort((a, b) => (b.lag ?? 0) - (a.lag ?? 0))}
      keyOf=${(each) => `${each.input} ${each.topic} ${each.partition}`} empty=${html`<${Empty} title="No partition is known yet">The receiver job asks Kafka for them when it starts.</${Empty}>`} />
    ${listeners.length ? html`<h2>Listeners</h2>
      <${Table} caption="Listeners" columns=${LISTENERS} rows=${listeners} keyOf=${(each) => each.name} />` : null}`;
}

/** @param {{error: {at: string, text: string, stack: string | null}}} props */
function LastError({ error }) {
  return html`<${Ago} at=${error.at} />: <span class="error">${error.text}</span>
    ${error.stack ? html`<details><summary>Stack</summary><pre>${error.stack}</pre></details>` : null}`;
}

const RECEIVERS = [
  { name: "Receiver", cell: (each) => `${each.index} of ${each.input}` },
  { name: "State", cell: (each) => html`<${StateBadge} state=${each.paused_reason ? "paused" : each.state} />${each.paused_reason ? html`<div class="quiet">${each.paused_reason}</div>` : null}` },
  { name: "Host", cell: (each) => html`${each.host ?? "–"}${each.executor ? html`<div class="quiet">executor ${each.executor}</div>` : null}` },
  { name: "Epoch", number: true, cell: (each) => html`${each.epoch ?? "–"}<div class="quiet">${count(each.restarts)} restarts</div>` },
  { name: "Partitions", number: true, cell: (each) => count(each.partitions) },
  { name: "Rate", number: true, cell: (each) => html`${rate(each.rate)}<div class="quiet">${each.rate_limit == null ? "no limit" : `limit ${rate(each.rate_limit)}`}</div>` },
  { name: "Queue", number: true, cell: (each) => html`${count(each.queue_blocks)} blocks<div class="quiet">${bytes(each.queue_bytes)}</div>` },
  { name: "Lag", number: true, cell: (each) => html`${count(each.lag)}${each.late_records == null ? null : html`<div class="quiet">${count(each.late_records)} late records</div>`}` },
  { name: "Heartbeat", cell: (each) => html`<${Ago} at=${each.heartbeat_at} /><div class="quiet">${each.sealed_through ? html`sealed through <${Ago} at=${each.sealed_through} />` : "nothing sealed yet"}</div>` },
  { name: "Last error", wide: true, cell: (each) => (each.last_error ? html`<${LastError} error=${each.last_error} />` : "none") },
];

const LISTENERS = [
  { name: "Listener", cell: (each) => each.name },
  { name: "Dropped", number: true, cell: (each) => count(each.dropped) },
  { name: "Missed", number: true, cell: (each) => count(each.missed) },
  { name: "Failed calls", number: true, cell: (each) => count(each.failed) },
  { name: "Problem", wide: true, cell: (each) => (each.slow || each.error ? html`<span class="error">${[each.slow, each.error].filter(Boolean).join("; ")}</span>` : "none") },
];

/**
 * @param {number} highest  the highest lag of a partition
 * @param {boolean} byTimestamp  whether the stream's batches are by timestamp: its partitions have watermarks
 */
function partitionColumns(highest, byTimestamp) {
  return [
    { name: "Topic", cell: (each) => each.topic },
    { name: "Partition", number: true, cell: (each) => each.partition },
    { name: "Receiver", cell: (each) => each.receiver ?? "none" },
    { name: "State", cell: (each) => html`<${StateBadge} state=${each.state} />` },
    { name: "Next offset", number: true, cell: (each) => count(each.next_offset) },
    { name: "Lag", number: true, cell: (each) => count(each.lag) },
    { name: "Share", cell: (each) => html`<span class="meter" aria-hidden="true"><span style=${{ width: `${(100 * (each.lag ?? 0)) / highest}%` }}></span></span>` },
    ...(byTimestamp ? [
      { name: "Watermark", cell: (each) => (each.watermark ? html`<${Time} at=${each.watermark} />` : "none yet") },
      { name: "Drained", cell: (each) => (each.drained ? html`<${Ago} at=${each.drained} />` : "not yet") },
    ] : []),
    { name: "Error", wide: true, cell: (each) => (each.error ? html`<span class="error">${each.error}</span>` : null) },
  ];
}

