# SPDX-License-Identifier: Apache-2.0
"""One model as a long-running job server.

    cli -> launching -> app -> service -> steps -> model_folder, opening, kinds
                         |        |-----> states, idle, callbacks, state_file
                         |--> routes -> service, streaming

Lives here: the states of a service from its first answer to its last, the routes of TAO's inference microservice, what the
architectures (`profiles`) and the kinds of models (`kinds`) take and give. May not live here: how a model computes
(`engine`), how a URL is fetched (`storage`), how a picture is decoded (`media`).
"""
