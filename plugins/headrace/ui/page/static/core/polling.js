/** Data that is asked for again every few seconds, while the page can be seen. */

import { ApiError, get } from "./api.js";
import { useCallback, useEffect, useRef, useState } from "./html.js";

/**
 * @typedef {object} Polled
 * @property {any} data      the newest answer; null before the first
 * @property {ApiError | null} error  why the newest request failed; the data then are old
 * @property {() => void} refresh  asks now
 */

/**
 * Ask for `path` now and every `seconds`; not while the page is hidden, and at once when it is seen again. Old data stay
 * while newer are on their way, and when the next request fails.
 *
 * @param {string | null} path  null: nothing is asked
 * @param {number} [seconds]  0: asked once
 * @returns {Polled}
 */
export function usePolled(path, seconds = 5) {
  const [state, setState] = useState({ path, data: null, error: null });
  const ask = useRef(() => {});

  useEffect(() => {
    if (path === null) return undefined;
    let ended = false, asking = false, again = false, timer = 0;

    async function look() {
      clearTimeout(timer);
      if (asking) { again = true; return; }
      asking = true;
      let next;
      try {
        next = { path, data: await get(path), error: null };
      } catch (error) {
        next = { error: error instanceof ApiError ? error : new ApiError(0, String(error)) };
      }
      asking = false;
      if (ended) return;
      setState((old) => (old.path === path ? { ...old, ...next } : { path, data: null, error: null, ...next }));
      // A signed-out page does not ask on: each request would be one more refusal in the server's log.
      if (again) { again = false; look(); }
      else if (seconds && next.error?.status !== 401 && !document.hidden) timer = setTimeout(look, seconds * 1000);
    }
    const seen = () => { if (document.hidden) clearTimeout(timer); else if (seconds) look(); };
    ask.current = look;
    document.addEventListener("visibilitychange", seen);
    look();
    return () => {
      ended = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, [path, seconds]);

  const refresh = useCallback(() => ask.current(), []);
  const own = state.path === path ? state : { data: null, error: null };
  return { data: own.data, error: own.error, refresh };
}
