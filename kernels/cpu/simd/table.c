/* The table of one compilation. See simd_table.h. */
#include "kernels/cpu/simd/parts.h"

#define SIMD_TEXT2(suffix) #suffix
#define SIMD_TEXT(suffix) SIMD_TEXT2(suffix)

const struct simd_table SIMD(simd_table) = {
    .name = SIMD_TEXT(SIMD_SUFFIX),
    .elem_bytes = sizeof(elem),
#if defined(__FMA__) || defined(SIMD_STORE_BF16)
    .panel_rows = PANEL_ROWS,
    .panel_columns = PANEL_COLUMNS,
#endif
    .arrange_left = SIMD(arrange_left),
    .arrange_right = SIMD(arrange_right),
    .multiply_panels = SIMD(multiply_panels),
    .column_sums = SIMD(column_sums),
    .norm_forward = SIMD(norm_forward),
    .norm_backward_rows = SIMD(norm_backward_rows),
    .norm_backward_columns = SIMD(norm_backward_columns),
    .gelu_forward = SIMD(gelu_forward),
    .gelu_backward = SIMD(gelu_backward),
    .swiglu_forward = SIMD(swiglu_forward),
    .swiglu_backward = SIMD(swiglu_backward),
    .dropout_row = SIMD(dropout_row),
    .cross_entropy_row = SIMD(cross_entropy_row),
    .adamw = SIMD(adamw),
    .sum_squares = SIMD(sum_squares),
    .sum_parts = SIMD(sum_parts),
    .add = SIMD(add),
    .accumulate = SIMD(accumulate),
    .embed_row = SIMD(embed_row),
    .widen = SIMD(widen),
    .narrow = SIMD(narrow),
    .fill = SIMD(fill),
    .random_normal = SIMD(random_normal),
    .rotate = SIMD(rotate),
    .exponential = SIMD(exponential),
    .attention_forward = SIMD(attention_forward),
    .attention_delta = SIMD(attention_delta),
    .attention_backward = SIMD(attention_backward),
};
