// SPDX-License-Identifier: Apache-2.0
// The console of a server: its pages, the key, and the server's status.

import { changeKey, get, latest, listen, rates, refresh } from "./api.js";
import { byId, perSecond, setText, startPages } from "./components.js";
import { modelPage, modelsPage, trafficPage } from "./model.js";
import { overviewPage } from "./overview.js";
import { playgroundPage } from "./playground.js";
import { requestsPage } from "./requests.js";

const PAGES = {
  overview: overviewPage,
  models: (main, name) => (name ? modelPage(main, decodeURIComponent(name)) : modelsPage(main)),
  requests: requestsPage,
  playground: playgroundPage,
  traffic: trafficPage,
};

byId("key-button").addEventListener("click", async () => {
  if (await changeKey("Send this key with every call. Leave it empty to send none.")) refresh();
});
const show = startPages(PAGES, "overview");
listen((error) => {
  const status = byId("status");
  if (error) {
    setText(status, error.needsKey ? "API key needed" : "Server does not answer");
    status.className = "status bad";
    return;
  }
  const now = rates("");
  setText(status, `${latest().ready ? "Ready" : "Not ready"}${now ? `, ${perSecond(now.requests)}` : ""}`);
  status.className = `status ${latest().ready ? "good" : "busy"}`;
});
await refresh();
show();
get("admin/traffic", { quiet: true })
  .then((told) => (byId("traffic-link").hidden = !told.splits.length))
  .catch(() => {});
