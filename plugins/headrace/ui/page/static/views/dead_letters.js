/** Records that an output refused, with the reason. They are asked for once: they come from Elasticsearch. */

import { streamPath, withQuery } from "../core/api.js";
import { count } from "../core/format.js";
import { html } from "../core/html.js";
import { usePolled } from "../core/polling.js";
import { replaceQuery } from "../core/router.js";
import { Action } from "../parts/action.js";
import { Empty, WithData } from "../parts/messages.js";
import { Table } from "../parts/table.js";
import { Time } from "../parts/time.js";

/** @param {{stream: any, query: Record<string, string>}} props */
export function DeadLetters({ stream, query }) {
  // Only outputs to Elasticsearch have dead letters; the API counts them by output.
  const outputs = Object.keys(stream.counts.dead_letters);
  const output = query.output ?? outputs[0] ?? "";
  const polled = usePolled(output === "" ? null : withQuery(streamPath(stream.name, "dead-letters"), { output, limit: 100 }), 0);
  if (output === "") return html`<${Empty} title="No output writes to Elasticsearch">Only such outputs have dead letters.</${Empty}>`;
  return html`
    <div class="filters">
      <label class="field"><span>Output</span><select value=${output} onChange=${(event) => replaceQuery({ output: event.currentTarget.value })}>
        ${outputs.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label>
      <${Action} label="Replay" title=${`Index the dead letters of ${output} again`} path=${streamPath(stream.name, "dead-letters", "replay")} permitted=${stream.may?.operate === true}
        done=${polled.refresh} fields=${[{ name: "output", label: "Output", choices: [output] }]} />
      <button type="button" onClick=${polled.refresh}>Look again</button>
    </div>
    <${WithData} polled=${polled} what="the dead letters">${(data) => html`
      <p>${count(data.total)} dead letters in ${data.topic ? "topic " : ""}<code>${data.topic ?? data.index}</code>${data.total > data.letters.length ? `, the newest ${count(data.letters.length)} are shown` : ""}.</p>
      <${Table} caption=${`Dead letters of ${output}`} columns=${COLUMNS} rows=${data.letters} keyOf=${(each) => each.id}
        empty=${html`<${Empty} title="No dead letter">The output has taken each record.</${Empty}>`} />`}</${WithData}>`;
}

const COLUMNS = [
  { name: "Record", cell: (each) => (each.topic == null ? each.id : `${each.topic} / ${each.partition} / ${each.offset}`) },
  { name: "Refused", cell: (each) => html`<${Time} at=${each.at} />` },
  { name: "Batch", cell: (each) => html`<${Time} at=${each.batch_time} />` },
  { name: "Kind", cell: (each) => each.error_type ?? "–" },
  { name: "Replayed", cell: (each) => (each.replayed ? "yes" : "no") },
  { name: "Reason", wide: true, cell: (each) => html`<${Long} text=${html`<span class="error">${each.reason}</span>`} />` },
  { name: "Value", wide: true, cell: (each) => (each.value == null ? "–" : html`<${Long} text=${html`<code>${each.value}</code>`} />`) },
];

/** A text of which three lines are shown, and all of it after a click. @param {{text: any}} props */
function Long({ text }) {
  return html`<details><summary class="clipped">${text}</summary></details>`;
}
