"""All mutations, from the first transform to the programs."""

from tests.mutations import of_jaxprs, of_microbatch, of_place, of_programs, of_stages, of_tasks

MUTATIONS = (
    *of_microbatch.MUTATIONS,
    *of_stages.MUTATIONS,
    *of_tasks.MUTATIONS,
    *of_place.MUTATIONS,
    *of_programs.MUTATIONS,
    *of_jaxprs.MUTATIONS,
)
