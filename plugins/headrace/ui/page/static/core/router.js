/** The page's address: "#/streams/orders/batches?state=failed" is a path of parts and a query. */

import { useEffect, useState } from "./html.js";
import { mirrorAddress } from "./airflow_frame.js";

/**
 * @typedef {object} Route
 * @property {string[]} parts
 * @property {Record<string, string>} query
 */

/** @returns {Route} */
export function currentRoute() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decode), query: Object.fromEntries(new URLSearchParams(query)) };
}

/** @param {string} part */
function decode(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}

/**
 * @param {string[]} parts
 * @param {Record<string, string | number | null | undefined>} [query]  empty values are left out
 */
export function href(parts, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value != null && value !== "");
  const search = new URLSearchParams(given.map(([key, value]) => [key, String(value)])).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${search ? `?${search}` : ""}`;
}

/** Change the query of the present view without a step in the history. @param {Record<string, any>} query */
export function replaceQuery(query) {
  history.replaceState(history.state, "", href(currentRoute().parts, query));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** @returns {Route} */
export function useRoute() {
  const [route, setRoute] = useState(currentRoute);
  useEffect(() => {
    const follow = () => { setRoute(currentRoute()); mirrorAddress(); };
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return route;
}
