// The two keys, kept in this tab's sessionStorage, and the dialog that asks for them.

import { byId } from "./dom.js";

const API = "baton.api-key";
const ADMIN = "baton.admin-key";

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

/** Headers of a request that any client may make. */
export const clientHeaders = () => headers(sessionStorage.getItem(API));
/** Headers of the stream: the admin key opens it too, and shows more. */
export const viewerHeaders = () => headers(sessionStorage.getItem(ADMIN) || sessionStorage.getItem(API));
export const hasAdminKey = () => Boolean(sessionStorage.getItem(ADMIN));

/** Wire the dialog; `changed` is called when other keys are to be used. Returns a function that opens it. */
export function setUpKeys(changed) {
  const dialog = byId("keys");
  const error = byId("keys-error");

  function use(api, admin) {
    sessionStorage.setItem(API, api);
    sessionStorage.setItem(ADMIN, admin);
    dialog.close();
    changed();
  }

  byId("keys-form").addEventListener("submit", (event) => {
    event.preventDefault();
    use(byId("api-key").value.trim(), byId("admin-key").value.trim());
  });
  byId("keys-forget").addEventListener("click", () => use("", ""));
  byId("keys-cancel").addEventListener("click", () => dialog.close());

  return function open(message = "") {
    byId("api-key").value = sessionStorage.getItem(API) ?? "";
    byId("admin-key").value = sessionStorage.getItem(ADMIN) ?? "";
    error.textContent = message;
    error.hidden = !message;
    if (!dialog.open) dialog.showModal();
  };
}
