/** Offsets that were lost to retention, resets or truncation, and records of abandoned batches. */

import { streamPath } from "../core/api.js";
import { count } from "../core/format.js";
import { html } from "../core/html.js";
import { usePolled } from "../core/polling.js";
import { Empty, WithData } from "../parts/messages.js";
import { Table } from "../parts/table.js";
import { Time } from "../parts/time.js";

/** @param {{stream: any}} props */
export function Gaps({ stream }) {
  const polled = usePolled(streamPath(stream.name, "gaps"), 15);
  return html`<${WithData} polled=${polled} what="the gaps">${(data) => html`
    <${Table} caption="Gaps" columns=${COLUMNS} rows=${data.gaps} keyOf=${(each, index) => each.id ?? index}
      empty=${html`<${Empty} title="No gap">Each offset that Kafka had is in the log or in a batch.</${Empty}>`} />`}</${WithData}>`;
}

const COLUMNS = [
  { name: "Found", cell: (each) => html`<${Time} at=${each.at} />` },
  { name: "Topic", cell: (each) => each.topic },
  { name: "Partition", number: true, cell: (each) => each.partition },
  { name: "From offset", number: true, cell: (each) => count(each.from_offset) },
  { name: "Until (not included)", number: true, cell: (each) => count(each.until_offset) },
  { name: "Offsets", number: true, cell: (each) => (count(each.until_offset - each.from_offset)) },
  { name: "Input", cell: (each) => each.input },
  { name: "Why", wide: true, cell: (each) => each.reason },
];
