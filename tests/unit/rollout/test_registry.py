import pytest

from rollout.registry import load_object


def test_an_object_is_imported_by_its_path() -> None:
    assert load_object("math:hypot")(3, 4) == 5


@pytest.mark.parametrize("spec", ["math.hypot", "math:", ":hypot", ""])
def test_another_form_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"not of the form 'my\.module:name'"):
        load_object(spec)


def test_a_missing_name_or_module_is_said() -> None:
    with pytest.raises(ValueError, match="module 'math' has no 'hypo'"):
        load_object("math:hypo")
    with pytest.raises(ValueError, match="importing 'no_such_module' failed: No module named"):
        load_object("no_such_module:name")
