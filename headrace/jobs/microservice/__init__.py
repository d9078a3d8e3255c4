# SPDX-License-Identifier: Apache-2.0
"""TAO's inference microservice: one model as a long-running server.

    programs.microservice -> command_line -> settings
                          -> routes -> service -> startup -> model_loader -> model_kinds
                                            |--> lifecycle, idle, chat

`profiles` has what each TAO architecture accepts, `model_kinds` what each kind of model takes and returns.
"""
