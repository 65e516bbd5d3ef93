/* Row-wise and element-wise steps of a decoder layer. Sums and functions are computed in float32. */

#ifndef BATON_ELEMENTWISE_H
#define BATON_ELEMENTWISE_H

#include "lanes.h"

/* Copy count elements between dtypes. */
INLINE void convert(void *to, const int64_t to_dtype, const void *from, const int64_t from_dtype, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to, i, load(from, i, from_dtype), to_dtype);
    for (; i < count; i++) store_one(to, i, load_one(from, i, from_dtype), to_dtype);
}

/* to = x / sqrt(mean(x**2) + epsilon) * weight, one row of count elements. */
INLINE void norm_row(void *to, const int64_t to_dtype, const void *x, const int64_t dtype, const float *weight,
                     int64_t count, float epsilon) {
    Lanes squares = {};
    float sum = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Lanes value = load(x, i, dtype);
        squares += value * value;
    }
    for (; i < count; i++) sum += load_one(x, i, dtype) * load_one(x, i, dtype);
    float scale = 1.0f / sqrtf((sum + lane_sum(squares)) / (float)count + epsilon);
    for (i = 0; i + LANES <= count; i += LANES)
        store(to, i, load(x, i, dtype) * scale * load(weight, i, BATON_F32), to_dtype);
    for (; i < count; i++) store_one(to, i, load_one(x, i, dtype) * scale * weight[i], to_dtype);
}

/* to = silu(gate) * up, silu(x) = x / (1 + e**-x). */
INLINE void silu_mul_row(void *to, const int64_t to_dtype, const void *gate, const void *up, const int64_t dtype,
                         int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Lanes x = load(gate, i, dtype);
        Lanes power = exp_lanes(-max_lanes(x, splat(-87.0f)));
        store(to, i, x / (power + 1.0f) * load(up, i, dtype), to_dtype);
    }
    for (; i < count; i++) {
        float x = load_one(gate, i, dtype);
        store_one(to, i, x / (1.0f + exp_one(x < -87.0f ? 87.0f : -x)) * load_one(up, i, dtype), to_dtype);
    }
}

/* Rotate one head of x in place: pairs (i, i + width / 2) by the angle that cos and sin [width] give. */
INLINE void rotate_head(void *x, const int64_t dtype, const void *cos, const void *sin, const int64_t angle_dtype,
                        int64_t width) {
    int64_t half = width / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        Lanes a = load(x, i, dtype), b = load(x, half + i, dtype);
        store(x, i, a * load(cos, i, angle_dtype) - b * load(sin, i, angle_dtype), dtype);
        store(x, half + i, b * load(cos, half + i, angle_dtype) + a * load(sin, half + i, angle_dtype), dtype);
    }
    for (; i < half; i++) {
        float a = load_one(x, i, dtype), b = load_one(x, half + i, dtype);
        store_one(x, i, a * load_one(cos, i, angle_dtype) - b * load_one(sin, i, angle_dtype), dtype);
        store_one(x, half + i, b * load_one(cos, half + i, angle_dtype) + a * load_one(sin, half + i, angle_dtype),
                  dtype);
    }
}

#endif
