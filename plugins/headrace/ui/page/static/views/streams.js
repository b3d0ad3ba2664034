/** All streams, one line each, the worst first. */

import { announce } from "../core/announce.js";
import { count, duration, rate, words } from "../core/format.js";
import { html, useEffect, useRef } from "../core/html.js";
import { usePolled } from "../core/polling.js";
import { replaceQuery } from "../core/router.js";
import { Link } from "../parts/link.js";
import { Empty, WithData } from "../parts/messages.js";
import { Sparkline } from "../parts/sparkline.js";
import { StateBadge, WORST_FIRST } from "../parts/state_badge.js";
import { Ago } from "../parts/time.js";
import { Words } from "../parts/words.js";

/** @param {{query: Record<string, string>}} props */
export function Streams({ query }) {
  const polled = usePolled("streams");
  return html`<h1 tabindex="-1">Streams</h1>
    <${WithData} polled=${polled} what="the streams">${(data) => html`<${List} data=${data} query=${query} />`}</${WithData}>`;
}

/** @param {{data: any, query: Record<string, string>}} props */
function List({ data, query }) {
  const streams = [...data.streams].sort((a, b) => place(a) - place(b) || (b.lag_seconds ?? 0) - (a.lag_seconds ?? 0) || a.name.localeCompare(b.name));
  const text = (query.text ?? "").toLowerCase(), state = query.state ?? "";
  const shown = streams.filter((each) => (!state || each.state === state) && `${each.name} ${each.reason}`.toLowerCase().includes(text));
  const found = WORST_FIRST.map((each) => [each, streams.filter((stream) => stream.state === each).length]).filter(([, number]) => number);
  useStateChanges(streams);
  return html`
    <${ImportErrors} />
    ${(data.problems ?? []).map((each) => html`<${StreamProblem} key=${[each.kind, each.ledger, ...each.streams].join(" ")} problem=${each} />`)}
    ${streams.length ? html`
      <div class="filters" role="search" aria-label="Filter the streams">
        <label class="field"><span>Name or reason</span>
          <input type="search" value=${query.text ?? ""} onInput=${(event) => replaceQuery({ ...query, text: event.currentTarget.value })} /></label>
        <div class="chips" role="group" aria-label="State">
          ${[["", streams.length], ...found].map(([each, number]) => html`<button type="button" key=${each} class="chip"
            aria-pressed=${state === each} onClick=${() => replaceQuery({ ...query, state: each })}>${each ? words(each) : "all"} <b>${number}</b></button>`)}
        </div>
      </div>
      ${shown.length ? html`<${Lines} streams=${shown} />` : html`<${Empty} title="No stream matches the filter">
        <button type="button" onClick=${() => replaceQuery({})}>Show all ${streams.length}</button></${Empty}>`}`
      : data.problems?.length ? null : html`<${Empty} title="There is no stream yet">
        No DAG that you may read declares one. Put the file with a stream's DAGs into Airflow's DAG folder: the stream appears here when
        Airflow has read the file. If it does not appear, look at the import errors on Airflow's home page.</${Empty}>`}`;
}

/** @type {Record<string, (problem: any) => string>} */
const HEADINGS = {
  ledger_unreadable: () => "The streams of one ledger are not shown",
  several_batch_dags: (problem) => `Several DAGs declare the stream ${problem.streams[0]}`,
  new: (problem) => `The stream ${problem.streams[0]} is new`,
  not_registered: (problem) => `The stream ${problem.streams[0]} has not run yet`,
  same_name: (problem) => `Two ledgers have a stream ${problem.streams[0]}`,
};

/** @param {{problem: any}} props */
function StreamProblem({ problem }) {
  const { kind, ledger, error, remedy, streams } = problem;
  return html`<div class=${`message ${kind === "new" ? "" : "problem"}`} role=${kind === "new" ? "status" : "alert"}>
    <strong>${HEADINGS[kind]?.(problem) ?? words(kind)}</strong>${ledger ? html`<div><code>${ledger}</code></div>` : null}
    <div>${error}</div>${remedy ? html`<div><b>What to do:</b> ${remedy}</div>` : null}
    ${kind === "ledger_unreadable" && streams.length ? html`<div>In it: ${streams.join(", ")}</div>` : null}</div>`;
}

/** The DAG files that Airflow cannot import: a stream in them is not in the list, or no longer as its file says. */
function ImportErrors() {
  const { data } = usePolled("../../../api/v2/importErrors?limit=20&order_by=-timestamp", 30);
  const found = data?.import_errors ?? [];
  if (!found.length) return null;
  return html`<div class="message problem" role="alert">
    <strong>${data.total_entries === 1 ? "A DAG file cannot be imported" : `${count(data.total_entries)} DAG files cannot be imported`}</strong>
    ${found.map((each) => html`<details key=${each.import_error_id} class="whole"><summary><code>${each.filename}</code>: ${lastLine(each.stack_trace)}</summary>
      <pre>${each.stack_trace}</pre></details>`)}
  </div>`;
}

/** @param {string | null} text */
function lastLine(text) {
  return (text ?? "").trim().split("\n").at(-1);
}

/** @param {any} stream */
function place(stream) {
  const found = WORST_FIRST.indexOf(stream.state);
  return found < 0 ? WORST_FIRST.length : found;
}

/** Says aloud which stream has another state than at the last look. @param {any[]} streams */
function useStateChanges(streams) {
  const last = useRef(/** @type {Map<string, string> | null} */ (null));
  useEffect(() => {
    const states = new Map(streams.map((each) => [each.name, each.state]));
    const changed = last.current ? streams.filter((each) => last.current.has(each.name) && last.current.get(each.name) !== each.state) : [];
    if (changed.length) announce(changed.map((each) => `${each.name} is ${words(each.state)}`).join(", "));
    last.current = states;
  });
}

const COLUMNS = ["State", "Stream", "Why", "Input", "Lag", "Last completed batch", "Input, delay, lag"];

// The roles are repeated: on a narrow screen the style sheet lays the cells out as blocks, which drops them.
/** @param {{streams: any[]}} props */
function Lines({ streams }) {
  return html`<table class="streams" role="table" aria-label="Streams, the worst first">
    <thead role="rowgroup"><tr role="row">${COLUMNS.map((each) => html`<th key=${each} role="columnheader" scope="col">${each}</th>`)}</tr></thead>
    <tbody role="rowgroup">${streams.map((each) => html`<${Line} key=${`${each.ledger} ${each.name}`} stream=${each} />`)}</tbody>
  </table>`;
}

/** @param {{stream: any}} props */
function Line({ stream }) {
  const { last_completed_batch: last, sparklines = {} } = stream;
  return html`<tr role="row">
    <td role="cell" class="state"><${StateBadge} state=${stream.state} /></td>
    <th role="rowheader" scope="row" class="name"><${Link} to=${["streams", stream.name]}>${stream.name}</${Link}></th>
    <td role="cell" class="why"><${Words} text=${stream.reason} />${stream.remedy ? html`<div class="remedy"><${Words} text=${stream.remedy} /></div>` : null}${(stream.also ?? []).map((each) => html`<div class="also">Also: <${Words} text=${each} /></div>`)}</td>
    <td role="cell" class="brief" data-name="Input">${rate(stream.input_rate)}</td>
    <td role="cell" class="brief" data-name="Lag">${stream.lag == null ? "not known" : html`<b>${count(stream.lag)}</b> records`}${stream.lag_seconds == null ? null : html`<div class="quiet">${duration(stream.lag_seconds)}</div>`}</td>
    <td role="cell" class="brief" data-name="Last completed batch">${last
      ? html`<${Ago} at=${last.completed_at} /><div class="quiet">${count(last.records)} records in ${duration(last.total_delay)}</div>` : "none yet"}</td>
    <td role="cell" class="trend">
      <${Sparkline} values=${sparklines.input_rate ?? []} name="Input rate" show=${rate} />
      <${Sparkline} values=${sparklines.total_delay ?? []} name="Total delay" show=${duration} tone="delay" />
      <${Sparkline} values=${sparklines.lag ?? []} name="Lag" show=${(value) => `${count(value)} records`} tone="lag" />
    </td>
  </tr>`;
}
