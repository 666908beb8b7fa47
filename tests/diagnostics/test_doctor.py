import pytest

from maxtext.cli.main import main
from maxtext.common import extras
from maxtext.diagnostics import doctor


def test_doctor_on_this_machine(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in (
        "python",
        "jax ",
        "platform",
        "dot_product",
        "works",
        "XLA_CLIENT_MEM_FRACTION",
        "GiB free",
        "No problems found.",
    ):
        assert part in text


def test_describe_device():
    assert "bfloat16 989.4" in doctor.describe_device("NVIDIA H200")
    assert "not known" in doctor.describe_device("Abacus 3")


def test_problems_have_remedies():
    environ = {"JAX_DISABLE_JIT": "1", "JAX_ENABLE_X64": "true"}
    problems = list(doctor.environment_problems(environ))
    assert [problem.split()[0] for problem, _ in problems] == ["JAX_DISABLE_JIT", "JAX_ENABLE_X64"]
    assert all(remedy for _, remedy in problems)
    assert not list(doctor.environment_problems({}))


@pytest.mark.parametrize(
    ("libtpu", "fits"),
    [("0.0.42", True), ("0.0.42.1", True), ("0.0.421", False), ("0.0.51", False), (None, True)],
)
def test_reports_a_libtpu_that_jax_does_not_pin(monkeypatch, libtpu, fits):
    def version(package):
        if package == "libtpu" and libtpu is None:
            raise extras.metadata.PackageNotFoundError(package)
        return {"libtpu": libtpu, "jax": "0.10.2"}[package]

    pins = ["numpy>=2.0", 'libtpu==0.0.42.*; extra == "tpu"', 'requests; extra == "tpu"']
    monkeypatch.setattr(extras.metadata, "version", version)
    monkeypatch.setattr(extras.metadata, "requires", lambda package: pins)
    monkeypatch.setattr(doctor, "versions", lambda: iter(()))
    problems = list(doctor.version_problems())
    assert bool(problems) != fits
    if not fits:
        assert (
            problems[0][0]
            == f"libtpu {libtpu} is installed, but jax 0.10.2 requires libtpu 0.0.42.*"
        )
        assert "jax[tpu]" in problems[0][1]


def test_low_disk_and_failing_devices(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "MIN_FREE_BYTES", 2**60)
    report = doctor.diagnose(str(tmp_path / "not" / "there"), {})
    assert any("GiB are free" in problem for problem, _ in report.problems)

    import jax

    def broken():
        raise RuntimeError("Unable to initialize backend 'cuda'\nmore")

    monkeypatch.setattr(jax, "devices", broken)
    report = doctor.diagnose(str(tmp_path), {})
    assert report.problems[0][0] == "JAX finds no devices: Unable to initialize backend 'cuda'"
