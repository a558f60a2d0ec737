"""The points of a profile as a file, beside the cluster file that is made of them."""

from pathlib import Path

from pydantic_core import ValidationError

from meshfold.cost_models.calibration.points import Profile
from meshfold.errors import ClusterSpecError
from meshfold.plan_file.json_input import JsonFault, parse_json, read_json
from meshfold.plan_file.output_file import write_whole
from meshfold.plan_file.records import Records, first_fault
from meshfold.plan_file.text import json_text

_RECORDS = Records(specials={}, forms={})
_PROFILE = _RECORDS.validator(Profile)


def points_path(cluster_file: Path) -> Path:
    """cluster.points.json beside cluster.json."""
    return cluster_file.with_name(f"{cluster_file.stem}.points.json")


def profile_to_json(profile: Profile) -> str:
    """A line a point."""
    return json_text(_RECORDS.write(profile))


def save_profile(profile: Profile, path: Path) -> None:
    """Raises OptionError or OSError where it cannot be written."""
    write_whole(path, profile_to_json(profile))


def profile_from_json(text: str) -> Profile:
    """Inverse of profile_to_json. Raises JsonFault or ValidationError."""
    profile: Profile = _PROFILE.validate_python(parse_json(text))
    return profile


def load_profile(path: Path) -> Profile:
    """Raises ClusterSpecError for what is no file of points."""
    try:
        profile: Profile = _PROFILE.validate_python(read_json(path))
    except (JsonFault, ValidationError) as error:
        what = first_fault(error) if isinstance(error, ValidationError) else error
        raise ClusterSpecError(f"{path}: {what}; delete it to measure anew") from error
    return profile
