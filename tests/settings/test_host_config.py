"""--host_config: folders by the name of the host."""

import pytest
import yaml
from quick_runs import handlers_put_back, quick
from settings_of_pictures import noted, refused, settings_of

import resnet50_test
from transformer_test import Settings as TextSettings
from utils.launch import launcher
from utils.settings.config import parse, to_yaml
from utils.settings.yaml_file import places_of

HOSTS = {
    "node*": {"data_dir": "/pattern"},
    "node1.example.org": {"data_dir": "/full", "cache_dir": "/cache"},
    "node2": {"data_dir": "/short", "output": "/mnt/run"},
    "*": {},
}


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """hosts(name, content) -> the flags, on a host of this name."""

    def hosts(name: str, content=HOSTS) -> list[str]:
        monkeypatch.setattr("socket.gethostname", lambda: name)
        path = tmp_path / "hosts.yaml"
        path.write_text(
            content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        )
        return ["--host_config", str(path)]

    return hosts


@pytest.mark.parametrize(
    ("host", "data_dir"),
    [
        ("node1.example.org", "/full"),
        ("node2.example.org", "/short"),
        ("node2", "/short"),
        ("node3.example.org", "/pattern"),
        ("other", "data"),  # the default
    ],
)
def test_a_host_reads_its_own_entry(hosts, host, data_dir):
    assert settings_of(*hosts(host)).data_dir == data_dir


def test_the_first_pattern_that_fits_counts(tmp_path):
    path = tmp_path / "hosts.yaml"
    path.write_text('{"gpu*": {data_dir: a}, "gpu1*": {data_dir: b}}')
    assert places_of(path, "gpu17", {"data_dir"}) == {"data_dir": "a"}


def test_a_recipe_gives_way_and_the_command_line_wins(hosts, write):
    flags = hosts("node2")
    recipe = ["--config", str(write({"data_dir": "/recipe"}))]
    settings, origin = parse(resnet50_test.Settings, [*flags, *recipe, "--output", "mine"], "")
    assert (settings.data_dir, settings.output) == ("/short", "mine")
    assert (origin["data_dir"], origin["output"]) == ("host_config", "command line")
    text = to_yaml(settings, origin)
    assert "data_dir: /short  # host_config" in text and "# host_config: " in text
    assert settings_of("--config", write({"host_config": flags[1]})).data_dir == "/short"


def test_a_resumed_run_keeps_its_folder_and_reads_the_data_of_the_host(hosts, make_run):
    run = make_run("--dataset", "imagefolder")
    settings = settings_of("--resume", run, *hosts("node2"))
    assert (settings.data_dir, settings.output) == ("/short", str(run))


def test_a_folder_of_data_implies_the_data_set(hosts, tmp_path):
    (tmp_path / "pictures" / "train").mkdir(parents=True)
    flags = hosts("here", {"here": {"data_dir": str(tmp_path / "pictures")}})
    settings, lines = noted(*flags)
    assert settings.dataset == "imagefolder" and "has a folder train/" in lines[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"another": {"data_dir": "x"}}, "fits this host, here"),
        (
            {"here": {"lr": 1}},
            "lr cannot depend on the host; data_dir, cache_dir, output, labels can",
        ),
        ({"here": "x"}, "for each host a name and its folders"),
        ("{", "is not valid YAML"),
        ({"here": {"data_dir": [1]}}, "data_dir"),
    ],
)
def test_a_file_that_does_not_help_is_refused(hosts, content, words):
    assert words in refused(*hosts("here", content))


def test_a_file_that_is_not_there_is_refused():
    assert "No such file" in refused("--host_config", "nowhere.yaml")


def test_texts_have_files_of_their_own(hosts):
    flags = hosts("here", {"here": {"train_file": "/local/a.csv"}})
    settings, _ = parse(TextSettings, ["--dataset", "csv", *flags], "")
    assert settings.train_file == "/local/a.csv"


def test_the_launcher_hands_on_the_folder_of_its_host(hosts, monkeypatch):
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.argv", ["launcher"])
    job = launcher.check(launcher.find_entry("resnet50_test.py"), hosts("node2"))
    assert (job.folder, job.folder_is_given) == ("/mnt/run", True)
    assert job.flags[-2:] == ["--output", "/mnt/run"]


@pytest.mark.slow
def test_a_run_is_kept_in_the_folder_of_its_host(hosts, tmp_path, monkeypatch):
    quick(monkeypatch)
    flags = hosts("here", {"*": {"output": str(tmp_path / "run")}})
    small = "--dataset shapes --device cpu --depth 18 --width 4 -b 50 --max_steps 1"
    with handlers_put_back():
        assert resnet50_test.main([*flags, *small.split()]) == 0
    assert (tmp_path / "run" / "summary.json").is_file()
