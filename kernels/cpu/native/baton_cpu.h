/* What the compiled CPU kernels share with Python (kernels/cpu/native/library.py declares the same structures).

   Sizes count elements, strides too, unless a name says bytes. A tensor of dtype BATON_BF16 holds the upper 16 bits of
   float32 values. Vectors that are small and constant (norm weights, biases, sinks) are float32 whatever the dtype. */

#ifndef BATON_CPU_H
#define BATON_CPU_H

#include <stdint.h>

#define BATON_ABI 6 /* to be raised with every change of this file */

enum { BATON_F32 = 0, BATON_BF16 = 1 };

/* out[row][n] = sum_k x[row][k] weight[n][k] + bias[n] */
typedef struct {
    const void *weight; /* [outputs, inputs], contiguous */
    const float *bias;  /* [outputs] or NULL */
    int64_t outputs;
    int64_t inputs;
} BatonLinear;

/* One layer's keys and values in the paged pool: a block is [kv_heads, block_size, dim]. */
typedef struct {
    void *k;
    void *v;
    int64_t k_stride; /* from block to block */
    int64_t v_stride;
    int64_t k_dim;
    int64_t v_dim;
    int64_t kv_heads;
    int64_t block_size;
    int64_t dtype;
} BatonCache;

/* Rows of one step that belong to one sequence and are attended together. */
typedef struct {
    int64_t begin;        /* the first row */
    int64_t num_queries;
    int64_t position;     /* of the first row */
    const int32_t *table; /* block ids of the sequence */
} BatonChunk;

/* The rows of one step: those that are attended one by one, and chunks of the others. */
typedef struct {
    int64_t num_tokens; /* T, all of them */
    int64_t num_chunks;
    const BatonChunk *chunks;
    int64_t num_rows;
    const int64_t *row_ids;   /* [num_rows] which rows of q */
    const int64_t *sequences; /* [num_rows] the sequence of each */
    const int64_t *positions; /* [num_rows] the position of each */
    const int64_t *slots;     /* [T] where each row's key and value go; -1: nowhere */
    const int32_t *tables;    /* [sequences, table_width] block ids */
    int64_t table_width;
} BatonRows;

/* See kernels/attention_form.py; 0 is off. */
typedef struct {
    double scaling;
    double softcap;
    int64_t window;
    int64_t chunk;
    const float *sinks; /* [q_heads] or NULL */
} BatonForm;

/* One decoder layer of the Llama pattern. */
typedef struct {
    BatonLinear q, k, v, o, gate, up, down;
    const float *attention_norm; /* [hidden] */
    const float *mlp_norm;       /* [hidden] */
    const float *q_norm;         /* [head_dim] or NULL */
    const float *k_norm;
    BatonForm form;
    double epsilon;
    int64_t head_dim;
    int64_t q_heads;
    int64_t kv_heads;
    int64_t dtype;
    int64_t rotary; /* 0: heads are not rotated */
} BatonLayer;

typedef struct BatonContext BatonContext; /* threads and scratch memory; used by one caller at a time */

#endif
