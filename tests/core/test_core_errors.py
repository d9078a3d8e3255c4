# SPDX-License-Identifier: Apache-2.0
"""Every code has one class, and the tree at the top of the module is the tree that is."""

import copy
import inspect

import pytest

from headrace.core import errors
from headrace.core.errors import Code, HeadraceError

CLASSES = HeadraceError.__subclasses__()


@pytest.mark.parametrize("code", Code)
def test_each_code_has_exactly_one_class(code):
    (owner,) = [kind for kind in CLASSES if kind.code is code]
    assert owner.__name__ == "".join(word.capitalize() for word in code.value.split("_"))
    assert owner.__module__ == errors.__name__


def test_every_class_has_its_own_code():
    assert len(CLASSES) == len(Code)
    assert all("code" in vars(kind) for kind in CLASSES)


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_can_be_sent_to_another_process(kind):
    error = errors.error_of(kind.code.value, "a text")
    assert (type(error), error.message) == (kind, "a text")
    assert type(errors.error_of("no code", "a text")) is errors.Internal


def test_a_subclass_keeps_the_code():
    assert all(refined.code is kind.code for kind in CLASSES for refined in kind.__subclasses__())


def test_an_error_is_reported_as_the_class_that_it_refines():
    class Refined(errors.NotFound):
        def __init__(self, place: int) -> None:
            super().__init__(f"nothing at {place}", retry_after_seconds=2.0)

    reported = errors.with_message(Refined(7), "in the house, nothing at 7")
    assert (type(reported), reported.message, reported.retry_after_seconds) == (
        errors.NotFound,
        "in the house, nothing at 7",
        2.0,
    )


def test_the_docstring_of_each_class_says_when_to_raise_it():
    assert all(kind.__doc__.startswith("Raise ") for kind in CLASSES)


def test_the_drawn_tree_names_every_class():
    drawn = [line.split()[1] for line in inspect.getdoc(errors).splitlines() if line.lstrip().startswith(("├", "└"))]
    assert drawn == [kind.__name__ for kind in CLASSES]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_keeps_its_arguments(kind):
    error = kind("do this instead", retry_after_seconds=1.5)
    assert (error.message, str(error), error.retry_after_seconds) == ("do this instead", "do this instead", 1.5)
    assert kind("again").retry_after_seconds is None
    for twin in (copy.copy(error), copy.deepcopy(error)):
        assert (type(twin), twin.message, twin.retry_after_seconds) == (kind, "do this instead", 1.5)


def test_values_of_codes_are_their_names():
    assert [code.value for code in Code] == [code.name.lower() for code in Code]
