// SPDX-License-Identifier: Apache-2.0
// The console of a server: its pages, the key, and the server's status.

import { changeKey, get } from "./api.js";
import { number, setText } from "./dom.js";
import { frame } from "./frame.js";
import { livePage } from "./live.js";
import { modelsPage } from "./models.js";
import { tryPage } from "./play.js";
import { requestsPage } from "./requests.js";
import { history, latest, listen, look, step } from "./store.js";
import { trafficPage } from "./traffic.js";

const PAGES = { models: modelsPage, live: livePage, requests: requestsPage, try: tryPage, traffic: trafficPage };

function tellStatus(error) {
  const status = document.getElementById("status");
  if (error) {
    setText(status, error.status === 401 || error.status === 403 ? "an API key is needed" : "the server does not answer");
    return;
  }
  const now = latest();
  const before = history[history.length - 2];
  const rate = before ? `, ${number(step(before, now, "").requests)} requests/s` : "";
  setText(status, `${now.ready ? "ready" : "not ready"}${rate}`);
}

document.getElementById("key-button").addEventListener("click", async () => {
  if (await changeKey("Send this key with every call. Leave it empty to send none.")) look();
});
const show = frame(PAGES, "models");
listen(tellStatus);
await look();
show();
get("admin/traffic", { quiet: true })
  .then((told) => (document.getElementById("traffic-link").hidden = !told.splits.length))
  .catch(() => {});
