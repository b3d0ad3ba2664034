/** Requests to headrace's API: same origin, with Airflow's cookie. */

const ROOT = new URL("api/v1/", document.baseURI);
const PATIENCE_MS = 30_000;

/** What the API answered instead of data. `status` is 0 if no answer came. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   * @param {string | null} [remedy]
   */
  constructor(status, message, remedy = null) {
    super(message);
    this.status = status;
    this.remedy = remedy;
  }
}

let clockOffsetMs = 0;

/** The server's time in milliseconds: ages stay right on a machine whose clock is wrong. */
export function now() {
  return Date.now() + clockOffsetMs;
}

/** @param {Response} response */
function followClock(response) {
  const server = Date.parse(response.headers.get("Date") ?? "");
  // The header has whole seconds, so smaller differences mean nothing.
  if (!Number.isNaN(server)) clockOffsetMs = Math.abs(server - Date.now()) > 2000 ? server - Date.now() : 0;
}

/** @param {unknown} detail  FastAPI's: a text, or a list of the fields that are wrong */
function textOf(detail) {
  if (typeof detail === "string") return detail;
  if (Array.isArray(detail)) return detail.map((each) => `${(each.loc ?? []).slice(1).join(".")}: ${each.msg}`).join("; ");
  return detail == null ? "" : JSON.stringify(detail);
}

/**
 * @param {string} path  below /api/v1/
 * @param {RequestInit} options
 * @returns {Promise<any>}
 * @throws {ApiError}
 */
async function request(path, options) {
  let response;
  try {
    response = await fetch(new URL(path, ROOT), {
      credentials: "same-origin", cache: "no-store", redirect: "error", signal: AbortSignal.timeout(PATIENCE_MS), ...options,
    });
  } catch (problem) {
    const late = problem instanceof DOMException && problem.name === "TimeoutError";
    throw new ApiError(0, late ? `No answer for ${PATIENCE_MS / 1000} seconds.` : "The API server does not answer.");
  }
  followClock(response);
  let body = null;
  try {
    body = await response.json();
  } catch {
    if (response.ok) throw new ApiError(response.status, "The answer is not JSON: is a proxy between this page and Airflow?");
  }
  if (!response.ok) throw new ApiError(response.status, textOf(body?.detail) || response.statusText || `HTTP ${response.status}`, body?.remedy);
  return body;
}

/**
 * @param {string} path
 * @param {Record<string, string | number | null | undefined>} [query]  empty values are left out
 */
export function get(path, query = {}) {
  return request(withQuery(path, query), {});
}

/**
 * @param {string} path
 * @param {object} body
 */
export function post(path, body) {
  return request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

/**
 * @param {string} path
 * @param {Record<string, string | number | null | undefined>} query
 */
export function withQuery(path, query) {
  const given = Object.entries(query).filter(([, value]) => value != null && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given.map(([key, value]) => [key, String(value)]))}` : path;
}

/** The path of a stream, or of something below it. @param {string[]} parts */
export function streamPath(...parts) {
  return ["streams", ...parts.map(encodeURIComponent)].join("/");
}
