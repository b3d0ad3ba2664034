/** One record's way: from Kafka to what became of it in each output. */

import { streamPath, withQuery } from "../core/api.js";
import { words } from "../core/format.js";
import { html, useState } from "../core/html.js";
import { usePolled } from "../core/polling.js";
import { replaceQuery } from "../core/router.js";
import { WithData } from "../parts/messages.js";
import { Tree } from "../parts/tree.js";

const FORMS = [
  ["offset", "Topic, partition, offset", ["topic", "partition", "offset"]],
  ["document", "Document id", ["document_id"]],
  ["key", "Key", ["key"]],
];

/** @param {{stream: any, query: Record<string, string>}} props */
export function Trace({ stream, query }) {
  const [by, setBy] = useState(() => FORMS.find(([, , names]) => query[names[0]])?.[0] ?? "offset");
  const [, , names] = FORMS.find(([each]) => each === by);
  const asked = Object.fromEntries(names.map((name) => [name, query[name]]));
  const polled = usePolled(names.every((name) => query[name]) ? withQuery(streamPath(stream.name, "trace"), asked) : null, 0);
  const topics = [...new Set((stream.partitions ?? []).map((each) => each.topic))];
  const submit = (event) => {
    event.preventDefault();
    const form = new FormData(event.currentTarget);
    replaceQuery(Object.fromEntries(names.map((name) => [name, String(form.get(name) ?? "").trim()])));
    polled.refresh();
  };
  return html`
    <div class="chips" role="group" aria-label="Find the record by">
      ${FORMS.map(([value, name]) => html`<button key=${value} type="button" class="chip" aria-pressed=${by === value} onClick=${() => { setBy(value); replaceQuery({}); }}>${name}</button>`)}
    </div>
    <form class="filters" key=${by} onSubmit=${submit} aria-label="Trace a record">
      ${names.map((name) => html`<label class="field" key=${name}><span>${words(name)}</span>
        <input name=${name} required autocomplete="off" defaultValue=${query[name] ?? (name === "topic" ? topics[0] ?? "" : "")}
          type=${["partition", "offset"].includes(name) ? "number" : "text"} min="0" /></label>`)}
      <button type="submit" class="primary">Trace</button>
    </form>
    ${names.every((name) => query[name]) ? html`<${WithData} polled=${polled} what="the record's way">${(data) => html`<${Tree} value=${data} />`}</${WithData}>`
      : html`<p class="quiet">Shows when Kafka had the record, which block and batch have it, and what each output made of it.</p>`}`;
}
