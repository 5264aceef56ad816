/* Quantize to e4m3 and restore in one pass: each value becomes the nearest that a code of its block stands for.
 *
 * Bit for bit `afmoe.moe.compute.rounding`, and so the contract of `afmoe.moe.quantization`. Compiled without
 * contraction of products and sums, which would round once where the contract rounds twice.
 */
#include <stdint.h>
#include <string.h>

#define STRIP 256

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float value_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Without the sign, bits are ordered as the magnitudes are, with NaN above infinity: a broken block stays so. */
static inline int32_t magnitude(float value) { return bits_of(value) & 0x7FFFFFFF; }

static inline int32_t greater(int32_t a, int32_t b) { return a > b ? a : b; }

static inline float block_scale(int32_t amax_bits, int powers_of_two) {
    float scale = value_of(greater(amax_bits, 0x2B8CBCCC)) / 448.0f; /* 1e-12 at the least */
    int32_t bits = bits_of(scale);
    if (powers_of_two && (bits & 0x7FFFFF) && bits < 0x7F800000) scale = value_of((bits & 0x7F800000) + 0x800000);
    return scale;
}

static inline float rounded(float value, float scale) {
    float quotient = value / scale;
    /* 2^e <= |quotient| < 2^(e+1), from -6 on, where the subnormal codes begin */
    float power = value_of(greater(bits_of(quotient) & 0x7F800000, 0x3C800000));
    /* the last bit of 1.5 * 2^20 * 2^e is worth 2^(e-3), the distance of two codes: adding it rounds to that */
    float anchor = power * 1572864.0f;
    return (quotient + anchor - anchor) * scale;
}

/* One scale for all values of a tile. */
static void round_tile(const float *x, int64_t x_row, float *out, int64_t out_row, int64_t rows, int64_t columns,
                       int powers_of_two) {
    int32_t amax = 0;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) amax = greater(amax, magnitude(x[i * x_row + j]));
    float scale = block_scale(amax, powers_of_two);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) out[i * out_row + j] = rounded(x[i * x_row + j], scale);
}

/* One scale a column, for at most STRIP columns. */
static void round_columns(const float *x, int64_t x_row, float *out, int64_t out_row, int64_t rows, int64_t columns,
                          int powers_of_two) {
    int32_t amax[STRIP] = {0};
    float scale[STRIP];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) amax[j] = greater(amax[j], magnitude(x[i * x_row + j]));
    for (int64_t j = 0; j < columns; j++) scale[j] = block_scale(amax[j], powers_of_two);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) out[i * out_row + j] = rounded(x[i * x_row + j], scale[j]);
}

/* out [M, rows, columns] from x of the same shape, both with adjacent columns, in tiles of block_rows x block_columns
 * (the last ones smaller). */
void afmoe_round_tiles(const float *x, int64_t x_matrix, int64_t x_row, float *out, int64_t num_matrices,
                       int64_t rows, int64_t columns, int64_t block_rows, int64_t block_columns, int powers_of_two,
                       int threads) {
    int64_t blocks = (rows + block_rows - 1) / block_rows;
#pragma omp parallel for num_threads(threads)
    for (int64_t task = 0; task < num_matrices * blocks; task++) {
        int64_t first = task % blocks * block_rows, place = task / blocks;
        const float *from = x + place * x_matrix + first * x_row;
        float *to = out + (place * rows + first) * columns;
        for (int64_t j = 0; j < columns; j += block_columns)
            round_tile(from + j, x_row, to + j, columns, least(block_rows, rows - first),
                       least(block_columns, columns - j), powers_of_two);
    }
}

/* The rows of each segment (int64 triples: anything, first row, row after the last) in blocks of `block` rows x 1
 * column that start again at each segment. */
void afmoe_round_columns(const float *x, int64_t x_row, float *out, int64_t out_row, const int64_t *segments,
                         int64_t num_segments, int64_t columns, int64_t block, int powers_of_two, int threads) {
    int64_t strips = (columns + STRIP - 1) / STRIP;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t task = 0; task < num_segments * strips; task++) {
        const int64_t *segment = segments + 3 * (task / strips);
        int64_t j = task % strips * STRIP;
        for (int64_t i = segment[1]; i < segment[2]; i += block)
            round_columns(x + i * x_row + j, x_row, out + i * out_row + j, out_row, least(block, segment[2] - i),
                          least(STRIP, columns - j), powers_of_two);
    }
}
