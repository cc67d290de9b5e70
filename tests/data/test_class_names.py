"""Names of classes that are perhaps the same, or several."""

from unicodedata import normalize

import pytest

from utils.data.class_names import by_form, merged_note, names_notes

COMPOSED, DECOMPOSED = (normalize(form, "café") for form in ("NFC", "NFD"))


def test_forms_of_one_name_are_one_class_and_others_stay_as_they_are():
    assert by_form([DECOMPOSED, "b"]) == {COMPOSED: DECOMPOSED, "b": "b"}
    for names in ([DECOMPOSED, COMPOSED], [COMPOSED, DECOMPOSED]):
        assert by_form(names) == {COMPOSED: COMPOSED}
        assert len(merged_note({*names}, [COMPOSED])) == 1
    assert merged_note({"b", "c"}, ["b", "c", "d"]) == []


@pytest.mark.parametrize(
    "classes, said",
    [
        (["Cat", "cat", "dog"], "'Cat' and 'cat' differ in spaces, case or Unicode form"),
        (["a b", "a  b"], "'a b' and 'a  b' differ"),
        ([COMPOSED, DECOMPOSED], "give them the same name"),
        (["healthy", "rust", "scab", "scab rust"], "1 class, such as 'scab rust', may be several"),
        (["a", "a,b", "a;b", "a | b", "b"], "3 classes, such as 'a,b'"),
    ],
)
def test_what_looks_wrong_is_told(classes, said):
    (note,) = names_notes(classes)
    assert said in note


@pytest.mark.parametrize("classes", [["hot dog", "dog"], ["1", "2"], ["a ", "b"], ["a", ", a"]])
def test_nothing_is_said_of_other_names(classes):
    assert names_notes(classes) == []
