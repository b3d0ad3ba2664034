/** One stream: its state and what to do, and its tabs. */

import { announce } from "../core/announce.js";
import { streamPath } from "../core/api.js";
import { count, duration, rate, words } from "../core/format.js";
import { html, useEffect, useRef } from "../core/html.js";
import { usePolled } from "../core/polling.js";
import { Action } from "../parts/action.js";
import { Facts } from "../parts/facts.js";
import { Link, OutsideLink } from "../parts/link.js";
import { WithData } from "../parts/messages.js";
import { StateBadge } from "../parts/state_badge.js";
import { Ago, Time } from "../parts/time.js";
import { Words } from "../parts/words.js";
import { Batch } from "./batch.js";
import { Batches } from "./batches.js";
import { DeadLetters } from "./dead_letters.js";
import { Definition } from "./definition.js";
import { Events } from "./events.js";
import { Gaps } from "./gaps.js";
import { Log } from "./log.js";
import { Receivers } from "./receivers.js";
import { Timelines } from "./timelines.js";
import { Trace } from "./trace.js";

/** The tabs: the address, the name, the view. */
const TABS = [
  ["", "Timelines", Timelines],
  ["batches", "Batches", Batches],
  ["receivers", "Receivers", Receivers],
  ["events", "Events", Events],
  ["gaps", "Gaps", Gaps],
  ["dead-letters", "Dead letters", DeadLetters],
  ["log", "Log", Log],
  ["trace", "Trace a record", Trace],
  ["definition", "Definition", Definition],
];

/** @param {{name: string, rest: string[], query: Record<string, string>}} props */
export function Stream({ name, rest, query }) {
  const polled = usePolled(streamPath(name));
  return html`${polled.data === null ? html`<h1 tabindex="-1">${name}</h1>` : null}<${WithData} polled=${polled} what=${`the stream ${name}`}>${(stream) => html`
    ${rest[1] ? html`<${Crumbs} stream=${stream} />` : html`
      <${Header} stream=${stream} refresh=${polled.refresh} />
      <${Tabs} stream=${stream} current=${rest[0] ?? ""} />`}
    <${Tab} stream=${stream} rest=${rest} query=${query} refresh=${polled.refresh} />`}</${WithData}>`;
}

/** The header of a batch's view. @param {{stream: any}} props */
function Crumbs({ stream }) {
  return html`<nav class="crumbs" aria-label="Way back"><${Link} to=${["streams"]}>Streams</${Link}>
    <${Link} to=${["streams", stream.name]}>${stream.name}</${Link}><${StateBadge} state=${stream.state} />
    <${Link} to=${["streams", stream.name, "batches"]}>Batches</${Link}></nav>`;
}

/** @param {{stream: any, refresh: () => void}} props */
function Header({ stream, refresh }) {
  const { oldest_unfinished: oldest } = stream;
  const before = useRef(stream.state);
  useEffect(() => {
    if (before.current !== stream.state) announce(`${stream.name} is ${words(stream.state)}: ${stream.reason}`);
    before.current = stream.state;
  }, [stream.state]);
  const stopped = stream.desired_state === "stopped";
  const permitted = stream.may?.operate === true;
  return html`<header class="stream">
    <nav class="crumbs" aria-label="Way back"><${Link} to=${["streams"]}>Streams</${Link}></nav>
    <div class="headline">
      <h1 tabindex="-1">${stream.name}</h1><${StateBadge} state=${stream.state} large />
      <div class="buttons">
        ${stopped
          ? html`<${Action} label="Start" title=${`Start ${stream.name}`} path=${streamPath(stream.name, "start")} done=${refresh} permitted=${permitted} primary />`
          : html`<${Action} label="Stop" title=${`Stop ${stream.name}`} path=${streamPath(stream.name, "stop")} done=${refresh} permitted=${permitted}
              fields=${[{ name: "reason", label: "Reason, for the events" }]} danger />`}
      </div>
    </div>
    <div class=${`verdict ${stream.state}`}>
      <p class="reason"><${Words} text=${stream.reason} /></p>
      ${stream.details ? html`<details class="whole"><summary>The whole error</summary><pre>${stream.details}</pre></details>` : null}
      ${stream.remedy ? html`<p class="remedy"><strong>What to do:</strong> <${Words} text=${stream.remedy} /></p>` : null}
      ${(stream.also ?? []).map((each) => html`<p>Also: <${Words} text=${each} /></p>`)}
      ${oldest ? html`<p class="quiet">Oldest unfinished batch: <${Link} to=${["streams", stream.name, "batches", oldest.batch_time]}><${Time} at=${oldest.batch_time} /></${Link}>${`, ${words(oldest.state)}`}, ${duration(oldest.age)} old${oldest.error ? html`: <span class="error"><${Words} text=${oldest.error} /></span>` : null}</p>` : null}
    </div>
    <${Facts} facts=${[
      ["Input", rate(stream.input_rate)],
      ["Lag", html`${stream.lag == null ? "not known" : `${count(stream.lag)} records${stream.lag_unknown ? ` and ${stream.lag_unknown} partitions of unknown lag` : ""}`}${stream.lag_seconds == null ? null : `, ${duration(stream.lag_seconds)}`}`],
      ["Batch interval", duration(stream.batch_interval)],
      ["Last completed batch", stream.last_completed_batch ? html`<${Ago} at=${stream.last_completed_batch.completed_at} />` : "none yet"],
      ["Gaps", html`<${Link} to=${["streams", stream.name, "gaps"]}>${count(stream.counts?.gaps)}</${Link}>`],
      ["DAGs", html`<${DagLink} dag=${stream.batch_dag_id} />${" "}<${DagLink} dag=${stream.receiver_dag_id} />`],
    ]} />
  </header>`;
}

/** @param {{dag: string | null}} props */
function DagLink({ dag }) {
  return dag ? html`<${OutsideLink} url=${`../dags/${encodeURIComponent(dag)}`}>${dag}</${OutsideLink}>` : null;
}

/** @param {{stream: any, current: string}} props */
function Tabs({ stream, current }) {
  return html`<nav class="tabs" aria-label=${`Views of ${stream.name}`}>
    ${TABS.map(([address, name]) => html`<${Link} key=${address} to=${["streams", stream.name, ...(address ? [address] : [])]} current=${current === address}>${name}</${Link}>`)}
  </nav>`;
}

/** @param {{stream: any, rest: string[], query: Record<string, string>, refresh: () => void}} props */
function Tab({ stream, rest, query, refresh }) {
  if (rest[0] === "batches" && rest[1]) return html`<${Batch} key=${rest[1]} stream=${stream} batchTime=${rest[1]} refresh=${refresh} />`;
  const [address, name, view] = TABS.find(([each]) => each === (rest[0] ?? "")) ?? TABS[0];
  return html`<section key=${address} aria-label=${`${name} of ${stream.name}`}><${view} stream=${stream} query=${query} refresh=${refresh} /></section>`;
}
