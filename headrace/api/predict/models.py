# SPDX-License-Identifier: Apache-2.0
"""Which model, and which version, a request is for; and what is known of it.

Called by every way in, for every request. Asks the data plane each time, since models come and go, and keeps what it worked
out from a configuration until that is another.
"""

from __future__ import annotations

from headrace.api.predict.checks import Checker
from headrace.api.predict.known import KnownModel
from headrace.api.predict.labels import LATEST
from headrace.api.predict.settings import PredictSettings
from headrace.core.errors import InvalidArgument, NotFound, Unavailable
from headrace.engine.dataplane import DataPlane

_SHOWN = 16


class Models:
    """The models of a data plane."""

    def __init__(self, plane: DataPlane, settings: PredictSettings, checker: Checker) -> None:
        self._plane = plane
        self._default = settings.model
        self._checker = checker
        self._known: dict[tuple[str, str], KnownModel] = {}

    def default(self) -> str:
        """The model of a request that names none."""
        if self._default:
            return self._default
        names = self._plane.model_names()
        if len(names) == 1:
            return names[0]
        if not names:
            raise Unavailable("Model not loaded: the server has no model that is ready; ask again later")
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise InvalidArgument(f"the server has several models: send the request to /predict/NAME. They are: {shown}")

    def find(self, name: str, wanted: object = None) -> tuple[KnownModel, str]:
        """A model, and the number of the version that is wanted by its label or number; "" for any that serves."""
        known = self._of(name, "")
        if wanted is None or wanted in ("", LATEST):
            return known, ""
        if isinstance(wanted, bool) or not isinstance(wanted, str | int):
            raise InvalidArgument("'model_version' must be a string such as \"v1.0.0\", or a whole number")
        number = known.labels.number(str(wanted)[:256])
        try:
            return self._of(name, number), number
        except NotFound:
            versions = self._plane.metadata(name).versions
            shown = ", ".join(known.labels.label(each) for each in versions[:_SHOWN])
            raise NotFound(
                f"model '{name}' has no version {str(wanted)[:32]!a}: it has {shown}; "
                "leave model_version out for the newest"
            ) from None

    def _of(self, name: str, version: str) -> KnownModel:
        serving = self._plane.find(name, version)
        if serving is None:
            self._known.pop((name, version), None)
            # Raises, with what is the matter: it is loading, it failed, it does not exist.
            config = self._plane.config(name, version)
        else:
            config = serving.config
        known = self._known.get((name, version))
        if known is None or known.config is not config:
            known = self._known[name, version] = KnownModel(config, self._checker)
        return known
