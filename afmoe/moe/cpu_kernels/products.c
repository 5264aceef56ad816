/* Grouped products in fp32 on a CPU: the rows of each expert times its own weights.
 *
 * One parallel region multiplies for all experts. A task is a block of NR columns of one expert: it copies that
 * block of the right operand into a panel that is read in order, then multiplies MR rows of the left one at a
 * time, with their sums in registers (the scheme of Goto and van de Geijn, "Anatomy of High-Performance Matrix
 * Multiplication", 2008, without a copy of the left operand: an expert's rows are few).
 *
 * The order in which a sum is taken depends on its depth alone, not on the threads.
 *
 * Experts come as int64 triples: expert, first row, row after the last.
 */
#include <stdint.h>
#include <string.h>

/* What the registers hold: MR x 2 vectors of sums, two of the panel and one of the left operand. */
#if defined(__AVX512F__)
#define LANES 16
#define MR 12
#elif defined(__AVX__)
#define LANES 8
#define MR 6
#else
#define LANES 4
#define MR 6
#endif
#define NR (2 * LANES)
/* Depth of a panel: it fills half of a first-level cache, and a sum has parts of 128 products, which rounds less than
 * one that runs through (depth 256, against fp64: 2.1e-7 and 2.9e-7). */
#define KC 128
/* Left rows that a task multiplies with one panel, a multiple of MR. */
#define MC 480

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t int_vec __attribute__((vector_size(4 * LANES)));

#if LANES == 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif
#ifdef __clang__
#define INTERLEAVE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define INTERLEAVE(a, b, ...) __builtin_shuffle(a, b, (int_vec){__VA_ARGS__})
#endif

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* A matrix by its strides, in elements. */
typedef struct {
    const float *values;
    int64_t row, column;
} matrix;

static inline matrix part(matrix m, int64_t row, int64_t column) {
    m.values += row * m.row + column * m.column;
    return m;
}

/* panel[k][n] = right[k][n], whose columns are adjacent; zeros behind `columns`. */
static void pack_rows(float *panel, matrix right, int64_t depth, int64_t columns) {
    for (int64_t k = 0; k < depth; k++, panel += NR) {
        const float *row = right.values + k * right.row;
        if (columns == NR) {
            ((loose_vec *)panel)[0] = ((const loose_vec *)row)[0];
            ((loose_vec *)panel)[1] = ((const loose_vec *)row)[1];
        } else {
            memcpy(panel, row, columns * sizeof(float));
            memset(panel + columns, 0, (NR - columns) * sizeof(float));
        }
    }
}

/* Turn LANES x LANES values in registers: as many rounds of interleaving as LANES has bits. */
static inline void turn(float *out, const float *in, int64_t in_stride) {
    vec rows[LANES], mixed[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = *(const loose_vec *)(in + i * in_stride);
#pragma GCC unroll 4
    for (int round = 1; round < LANES; round *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            mixed[2 * i] = INTERLEAVE(rows[i], rows[i + LANES / 2], LOW);
            mixed[2 * i + 1] = INTERLEAVE(rows[i], rows[i + LANES / 2], HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = mixed[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) *(loose_vec *)(out + i * NR) = rows[i];
}

/* panel[k][n] = right[k][n], whose rows are best adjacent; zeros behind `columns`. */
static void pack_columns(float *panel, matrix right, int64_t depth, int64_t columns) {
    for (int64_t n = 0; n < NR; n += LANES) {
        int64_t turned = right.row == 1 && n + LANES <= columns ? depth / LANES * LANES : 0;
        for (int64_t k = 0; k < turned; k += LANES)
            turn(panel + k * NR + n, right.values + k + n * right.column, right.column);
        for (int64_t k = turned; k < depth; k++)
            for (int64_t j = n; j < n + LANES; j++)
                panel[k * NR + j] = j < columns ? right.values[k * right.row + j * right.column] : 0.0f;
    }
}

/* out[i][n] (+)= sum over k of left[i][k] * panel[k][n]. `rows` is a constant where this is inlined. */
static inline __attribute__((always_inline)) void multiply_tile(const int rows, matrix left, const float *panel,
                                                                int64_t depth, float *out, int64_t out_stride,
                                                                int64_t columns, int accumulate) {
    vec sums[MR][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) sums[i][0] = sums[i][1] = (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec first = ((const vec *)(panel + k * NR))[0], second = ((const vec *)(panel + k * NR))[1];
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            float value = left.values[i * left.row + k * left.column];
            sums[i][0] += first * value;
            sums[i][1] += second * value;
        }
    }
    if (columns == NR) {
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            loose_vec *place = (loose_vec *)(out + i * out_stride);
            if (accumulate) {
                sums[i][0] += place[0];
                sums[i][1] += place[1];
            }
            place[0] = sums[i][0];
            place[1] = sums[i][1];
        }
        return;
    }
    for (int i = 0; i < rows; i++) {
        float row[NR], *place = out + i * out_stride;
        memcpy(row, sums[i], sizeof(row));
        for (int64_t n = 0; n < columns; n++) place[n] = accumulate ? place[n] + row[n] : row[n];
    }
}

static void multiply_rows(int64_t rows, matrix left, const float *panel, int64_t depth, float *out,
                          int64_t out_stride, int64_t columns, int accumulate) {
    switch (rows) {
#define CASE(n)                                                                         \
    case n:                                                                             \
        multiply_tile(n, left, panel, depth, out, out_stride, columns, accumulate);     \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MR > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

/* out (+)= left @ right for at most NR columns of one expert; a sum of nothing is exactly zero. */
static void multiply_block(matrix left, matrix right, int64_t rows, int64_t columns, int64_t depth, float *out,
                           int64_t out_stride, int accumulate) {
    float panel[KC * NR] __attribute__((aligned(64)));
    if (depth == 0 && !accumulate)
        for (int64_t i = 0; i < rows; i++) memset(out + i * out_stride, 0, columns * sizeof(float));
    for (int64_t r = 0; r < rows; r += MC)
        for (int64_t k = 0; k < depth; k += KC) {
            int64_t part_depth = least(KC, depth - k);
            if (right.column == 1)
                pack_rows(panel, part(right, k, 0), part_depth, columns);
            else
                pack_columns(panel, part(right, k, 0), part_depth, columns);
            for (int64_t i = r; i < least(rows, r + MC); i += MR)
                multiply_rows(least(MR, rows - i), part(left, i, k), panel, part_depth, out + i * out_stride,
                              out_stride, columns, accumulate || k > 0);
        }
}

/* out[r] (+)= x[r] @ w[e] for the rows r of each expert e: x [R, depth], w [L, depth, columns], out [R, columns].
 * The columns of x and out are adjacent; w may lie in any way, best with its columns or its rows adjacent. */
void afmoe_multiply(const float *x, int64_t x_row, const float *w, int64_t w_expert, int64_t w_row, int64_t w_column,
                    float *out, int64_t out_row, const int64_t *experts, int64_t num_experts, int64_t depth,
                    int64_t columns, int accumulate, int threads) {
    int64_t blocks = (columns + NR - 1) / NR;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t task = 0; task < num_experts * blocks; task++) {
        const int64_t *expert = experts + 3 * (task / blocks);
        int64_t first = task % blocks * NR, start = expert[1];
        matrix left = {x + start * x_row, x_row, 1}, right = {w + expert[0] * w_expert, w_row, w_column};
        multiply_block(left, part(right, 0, first), expert[2] - start, least(NR, columns - first), depth,
                       out + start * out_row + first, out_row, accumulate);
    }
}

/* out[e] = grad.T @ x over the rows of each expert e: grad [R, rows], x [R, columns], out [L, rows, columns].
 * Exactly zero for an expert without rows. */
void afmoe_weight_gradient(const float *grad, int64_t grad_row, const float *x, int64_t x_row, float *out,
                           const int64_t *experts, int64_t num_experts, int64_t rows, int64_t columns, int threads) {
    int64_t blocks = (columns + NR - 1) / NR;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t task = 0; task < num_experts * blocks; task++) {
        const int64_t *expert = experts + 3 * (task / blocks);
        int64_t first = task % blocks * NR, width = least(NR, columns - first), start = expert[1];
        float *place = out + expert[0] * rows * columns + first;
        matrix left = {grad + start * grad_row, 1, grad_row}, right = {x + start * x_row + first, x_row, 1};
        multiply_block(left, right, rows, width, expert[2] - start, place, columns, 0);
    }
}
