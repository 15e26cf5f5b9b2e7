"""`tensorflow.python.tpu.tpu_embedding_gradient`: reached only with TPU embedding, which is refused before."""

from __future__ import annotations

from trainer._dropped.tpu_embedding import refuse

create_dummy_table_variables = refuse
hook_dummy_table_variables_to_activations = refuse
get_gradients_through_dummy_table_variables = refuse
