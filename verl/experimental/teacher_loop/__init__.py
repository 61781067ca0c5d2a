"""The import path that users know for teachers of a distillation."""

from verl.trainer.distillation.endpoint import EndpointTeacher
from verl.trainer.distillation.teaching import Teaching
from verl.workers.roles.teacher import TeacherWorker

__all__ = ["EndpointTeacher", "TeacherWorker", "Teaching"]
