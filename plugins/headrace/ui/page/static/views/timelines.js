/** Rates and delays over time, as on Spark's Streaming page. */

import { streamPath, withQuery } from "../core/api.js";
import { bytes, count, duration, rate } from "../core/format.js";
import { html, useMemo } from "../core/html.js";
import { usePolled } from "../core/polling.js";
import { href, replaceQuery } from "../core/router.js";
import { Empty, WithData } from "../parts/messages.js";
import { Phases } from "../parts/phases.js";
import { Timeline } from "../parts/timeline.js";

const POINTS = 200;
/** How far back, in seconds; "" is the API's own choice. */
const SPANS = [["", "newest"], ["900", "15 min"], ["3600", "1 h"], ["21600", "6 h"], ["86400", "1 day"], ["604800", "7 days"]];

/** @param {{stream: any, query: Record<string, string>}} props */
export function Timelines({ stream, query }) {
  // Rounded to whole 10 seconds, so that the address changes with the choice and not at each look.
  const from = useMemo(() => (query.span ? new Date(Math.floor(Date.now() / 10_000 - Number(query.span) / 10) * 10_000).toISOString() : null), [query.span]);
  const polled = usePolled(withQuery(streamPath(stream.name, "timeline"), { from, points: POINTS }));
  return html`
    <div class="chips" role="group" aria-label="Time shown">
      ${SPANS.map(([value, name]) => html`<button key=${value} type="button" class="chip" aria-pressed=${(query.span ?? "") === value}
        onClick=${() => replaceQuery({ span: value })}>${name}</button>`)}
    </div>
    <${WithData} polled=${polled} what="the timelines">${(data) => html`<${Charts} stream=${stream} data=${data} />`}</${WithData}>`;
}

/** @param {{from: string, until: string}} part */
function seconds(part) {
  return (Date.parse(part.until) - Date.parse(part.from)) / 1000;
}

/** @param {{stream: any, data: any}} props */
function Charts({ stream, data }) {
  const series = useMemo(() => {
    const batches = [...data.batches].sort((a, b) => a.batch_time.localeCompare(b.batch_time));
    const samples = [...data.samples].sort((a, b) => a.at.localeCompare(b.at));
    const of = (rows, at, name) => rows.map((each) => ({ at: each[at], value: each[name] }));
    const spreads = (name) => (data.whole ? { whole: data.whole, of: data.whole[name], parts: data.parts.map((each) => each[name]) } : null);
    return {
      batches,
      spreads: { scheduling: spreads("scheduling_delay"), processing: spreads("processing_time"), total: spreads("total_delay") },
      input: data.whole ? data.parts.map((each) => ({ at: each.from, value: each.records / seconds(each) })) : of(batches, "batch_time", "input_rate"), scheduling: of(batches, "batch_time", "scheduling_delay"),
      processing: of(batches, "batch_time", "processing_time"), total: of(batches, "batch_time", "total_delay"),
      lag: of(samples, "at", "lag"), lagSeconds: of(samples, "at", "lag_seconds"), queue: of(samples, "at", "queue_bytes"), log: of(samples, "at", "log_bytes"),
    };
  }, [data]);
  if (!data.batches.length && !data.samples.length) {
    return html`<${Empty} title="No batch and no sample in this time">The first batch appears after one batch interval of ${duration(data.batch_interval)}.</${Empty}>`;
  }
  const pick = (at) => { location.hash = href(["streams", stream.name, "batches", at]); };
  const limit = { value: data.batch_interval, name: "batch interval" };
  const note = data.whole
    ? `${count(data.whole.batches)} batches in ${count(data.parts.length)} parts: the median (line), the 95th percentile (dotted) and the slowest batch (area) of each. A click opens the slowest one.`
    : "A click on a point opens its batch. Beside each timeline: how often which value occurs.";
  return html`<p class="quiet note">${note}</p>
    <div class="charts">
      <${Timeline} title="Input rate" hint=${data.whole ? "records a second, the mean of each part" : "records a second, of each batch"} points=${series.input} show=${rate}
        onPick=${data.whole ? undefined : pick} />
      <${Timeline} title="Scheduling delay" hint="from the batch time to the start of the work" points=${series.scheduling} spreads=${series.spreads.scheduling} show=${duration} tone="delay" onPick=${pick} />
      <${Timeline} title="Processing time" hint="dashed: the batch interval" points=${series.processing} spreads=${series.spreads.processing} show=${duration} limit=${limit} onPick=${pick} />
      <${Timeline} title="Total delay" hint="from the batch time to completion" points=${series.total} spreads=${series.spreads.total} show=${duration} tone="delay" onPick=${pick} />
      <${Phases} title=${data.whole ? "Where the time of each part's slowest batch went" : "Where each batch's time went"} batches=${series.batches} interval=${data.batch_interval} onPick=${pick} />
      <${Timeline} title="Lag" hint="records in Kafka that are not in the log" points=${series.lag} show=${count} tone="lag" />
      <${Timeline} title="Lag in seconds" hint="all that Kafka had this long ago is in the log" points=${series.lagSeconds} show=${duration} tone="lag" />
      <${Timeline} title="Queue" hint="received, not yet in the log" points=${series.queue} show=${bytes} />
      <${Timeline} title="Log" hint="size of the log's files" points=${series.log} show=${bytes} />
    </div>`;
}
