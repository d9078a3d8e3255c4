-- SPDX-License-Identifier: Apache-2.0
-- Run by wrk (see load.py): arguments are the body's file, then header names and values in pairs.
function init(args)
  local file = assert(io.open(args[1], "rb"))
  wrk.body = file:read("*a")
  file:close()
  wrk.method = "POST"
  for position = 2, #args, 2 do
    wrk.headers[args[position]] = args[position + 1]
  end
end

function done(summary, latency, requests)
  local failed = summary.errors.connect + summary.errors.read + summary.errors.write
  failed = failed + summary.errors.status + summary.errors.timeout
  io.write(string.format("@@ %d %d %d %d %.1f %.1f\n", summary.requests, summary.duration, failed,
    summary.bytes, latency:percentile(50), latency:percentile(99)))
end
