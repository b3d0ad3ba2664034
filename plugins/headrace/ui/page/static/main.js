/** Shows the view of the page's address. */

import { Announcements } from "./core/announce.js";
import { followTheme, mirrorAddress } from "./core/airflow_frame.js";
import { ZONE } from "./core/format.js";
import { html, render, useEffect, useRef } from "./core/html.js";
import { useRoute } from "./core/router.js";
import { Link } from "./parts/link.js";
import { Empty } from "./parts/messages.js";
import { FromDag } from "./views/from_dag.js";
import { Stream } from "./views/stream.js";
import { Streams } from "./views/streams.js";

function Page() {
  const { parts, query } = useRoute();
  const main = useRef(/** @type {HTMLElement | null} */ (null));
  const place = parts.join("/");
  const before = useRef(place);
  useEffect(() => {
    document.title = `${[...parts].reverse().join(" – ") || "Streams"} – headrace`;
    if (before.current === place) return;
    // Another tab of the same stream keeps scroll position and focus. Where the focused element is gone, the view has it.
    if (document.activeElement === document.body) main.current?.focus({ preventScroll: true });
    if (parts.length === 4 || parts[1] !== before.current.split("/")[1]) scrollTo(0, 0);
    before.current = place;
  }, [place]);
  const skip = (event) => { event.preventDefault(); main.current?.focus(); };
  return html`
    <a class="skip" href="#content" onClick=${skip}>Skip to the content</a>
    <main id="content" tabindex="-1" ref=${main}>${view(parts, query)}<p class="quiet zone">Times are in ${ZONE}.</p></main>
    <${Announcements} />`;
}

/** @param {string[]} parts @param {Record<string, string>} query */
function view(parts, query) {
  const opened = new URLSearchParams(location.search);
  const dag = opened.get("dag_id");
  if (!parts.length && dag) return html`<${FromDag} dag=${dag} run=${opened.get("run_id")} />`;
  if (!parts.length || (parts[0] === "streams" && parts.length === 1)) return html`<${Streams} query=${query} />`;
  if (parts[0] === "streams") return html`<${Stream} key=${parts[1]} name=${parts[1]} rest=${parts.slice(2)} query=${query} />`;
  return html`<h1>Not found</h1><${Empty} title="There is no such view"><${Link} to=${["streams"]}>All streams</${Link}></${Empty}>`;
}

followTheme();
mirrorAddress();
render(html`<${Page} />`, document.getElementById("page"));
