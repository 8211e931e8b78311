/* Decodes a region of a JPEG at 1/1, 1/2, 1/4 or 1/8 with libjpeg-turbo's own API, because the TurboJPEG API also entropy-decodes
 * everything below the region. Errors return by longjmp within this file, never through Rust. Only region.rs calls these functions. */
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <jpeglib.h>
#include <jerror.h>

typedef struct {
  struct jpeg_error_mgr base;
  jmp_buf escape;
  char *message;
} failure;

/* The beginning of the library's private entropy decoder, which the library creates. No public API can replace it. Before raising the
 * version numbers, compare jpegint.h of the new release. */
_Static_assert(LIBJPEG_TURBO_VERSION_NUMBER >= 3000000 && LIBJPEG_TURBO_VERSION_NUMBER < 3002000, "jpegint.h was checked up to 3.1");
struct jpeg_entropy_decoder {
  void (*start_pass)(j_decompress_ptr);
  boolean (*decode_mcu)(j_decompress_ptr, JBLOCKROW *);
};

/* Matches `Scan` in entropy.rs. */
typedef struct {
  size_t count;
  int blocks;
  struct {
    int component, flat;
    const JHUFF_TBL *dc, *ac;
  } members[D_MAX_BLOCKS_IN_MCU];
} scan;

_Static_assert(D_MAX_BLOCKS_IN_MCU == 10 && sizeof(JBLOCK) == 128, "must match entropy.rs");
_Static_assert(offsetof(JHUFF_TBL, bits) == 0 && offsetof(JHUFF_TBL, huffval) == 17, "must match entropy.rs");

typedef struct {
  void *state;
  int (*begin)(void *state, const scan *scan);
  int (*mcu)(void *state, const unsigned char *bytes, size_t count, JCOEF *blocks);
} entropy;

typedef struct {
  struct jpeg_decompress_struct decoder;
  failure failure;
  entropy entropy;
  const unsigned char *bytes;
  size_t count;
  JDIMENSION column, first, last; /* MCU columns: the next one, and the first and last required ones. */
} session;

static void give_up(j_common_ptr decoder) {
  failure *failed = (failure *)decoder->err;
  failed->base.format_message(decoder, failed->message);
  longjmp(failed->escape, 1);
}

/* Count warnings in the library's counter, and ignore traces. */
static void note(j_common_ptr decoder, int level) {
  if (level < 0) decoder->err->num_warnings++;
}

static boolean decode_mcu(j_decompress_ptr d, JBLOCKROW *blocks) {
  session *s = (session *)d;
  int wanted = blocks && s->column >= s->first && s->column <= s->last;
  s->column = s->column + 1 == d->MCUs_per_row ? 0 : s->column + 1;
  /* The blocks of an MCU are contiguous. */
  if (s->entropy.mcu(s->entropy.state, s->bytes, s->count, wanted ? blocks[0][0] : NULL)) ERREXIT(d, JERR_BAD_HUFF_TABLE);
  return TRUE;
}

/* Let entropy.rs decode the scan if it can. Columns left..left + width of the output are required. */
static void take_over(session *s, int denominator, int left, int width) {
  struct jpeg_decompress_struct *d = &s->decoder;
  if (d->restart_interval) return;
  int column = (d->num_components == 1 ? 1 : d->max_h_samp_factor) * DCTSIZE / denominator; /* A one-component MCU is one block. */
  s->first = (JDIMENSION)(left / column);
  s->last = (JDIMENSION)((left + width - 1) / column);
  s->bytes = d->src->next_input_byte;
  s->count = d->src->bytes_in_buffer;
  s->column = 0;
  scan scan = {.count = s->count, .blocks = d->blocks_in_MCU};
  for (int i = 0; i < d->blocks_in_MCU; i++) {
    const jpeg_component_info *c = d->cur_comp_info[d->MCU_membership[i]];
    scan.members[i].component = d->MCU_membership[i];
    scan.members[i].flat = c->DCT_scaled_size == 1;
    scan.members[i].dc = d->dc_huff_tbl_ptrs[c->dc_tbl_no];
    scan.members[i].ac = d->ac_huff_tbl_ptrs[c->ac_tbl_no];
  }
  if (s->entropy.begin(s->entropy.state, &scan) == 0) d->entropy->decode_mcu = decode_mcu;
}

size_t penstock_jpeg_session_bytes(void) { return sizeof(session); }
size_t penstock_jpeg_message_bytes(void) { return JMSG_LENGTH_MAX; }

/* Create a session in penstock_jpeg_session_bytes() bytes of zeroed memory. `message` receives error texts. */
void penstock_jpeg_open(void *memory, char *message) {
  session *s = memory;
  s->decoder.err = jpeg_std_error(&s->failure.base);
  s->failure.base.error_exit = give_up;
  s->failure.base.emit_message = note;
  s->failure.message = message;
}

void penstock_jpeg_close(void *memory) {
  session *s = memory;
  if (setjmp(s->failure.escape)) return;
  jpeg_destroy_decompress(&s->decoder);
}

/* Read the header: width, height, width and height of an iMCU, and whether a region can be decoded separately. Returns 0, or -1 on error.
 * Creates a new decoder for each image, because the library keeps tables and would use them for a later file that lacks its own. */
int penstock_jpeg_header(void *memory, const unsigned char *bytes, size_t count, int out[5]) {
  session *s = memory;
  struct jpeg_decompress_struct *d = &s->decoder;
  if (setjmp(s->failure.escape)) return -1;
  jpeg_destroy_decompress(d);
  jpeg_create_decompress(d);
  d->err->num_warnings = 0;
  jpeg_mem_src(d, bytes, (unsigned long)count);
  jpeg_read_header(d, TRUE);
  out[0] = (int)d->image_width;
  out[1] = (int)d->image_height;
  out[2] = d->max_h_samp_factor * DCTSIZE;
  out[3] = d->max_v_samp_factor * DCTSIZE;
  /* The library keeps multi-scan files entirely in memory anyway. Other excluded files, such as lossless ones (Se is 0), are rare. */
  out[4] = !d->progressive_mode && !d->arith_code && d->data_precision == 8 && !d->err->num_warnings &&
           d->comps_in_scan == d->num_components && d->Se == DCTSIZE2 - 1 &&
           ((d->jpeg_color_space == JCS_YCbCr && d->num_components == 3) || (d->jpeg_color_space == JCS_GRAYSCALE && d->num_components == 1)) &&
           d->comp_info[0].h_samp_factor == d->max_h_samp_factor && d->comp_info[0].v_samp_factor == d->max_v_samp_factor;
  return 0;
}

/* Decode rows top..top + height and columns left..left + width of the picture at 1 / denominator as RGB rows of `pitch` bytes. Call
 * penstock_jpeg_header first. `left` must be on an iMCU boundary. Returns the number of warnings, -1 on error,
 * or -2 if the library chose other columns. */
int penstock_jpeg_region(void *memory, entropy entropy, int denominator, int left, int top, int width, int height, unsigned char *out, size_t pitch) {
  session *s = memory;
  struct jpeg_decompress_struct *d = &s->decoder;
  if (setjmp(s->failure.escape)) return -1;
  d->scale_num = 1;
  d->scale_denom = (unsigned)denominator;
  d->out_color_space = JCS_RGB;
  d->dct_method = JDCT_ISLOW;
  jpeg_start_decompress(d);
  JDIMENSION x = (JDIMENSION)left, w = (JDIMENSION)width;
  if (left != 0 || (JDIMENSION)width != d->output_width) jpeg_crop_scanline(d, &x, &w);
  if ((int)x != left || (int)w != width) return -2;
  s->entropy = entropy;
  if (entropy.state) take_over(s, denominator, left, width);
  if (top > 0) jpeg_skip_scanlines(d, (JDIMENSION)top);
  for (int row = 0; row < height;) {
    JSAMPROW rows[8];
    int wanted = height - row < 8 ? height - row : 8;
    for (int i = 0; i < wanted; i++) rows[i] = out + (size_t)(row + i) * pitch;
    int got = (int)jpeg_read_scanlines(d, rows, (JDIMENSION)wanted);
    if (got == 0) break;
    row += got;
  }
  return (int)d->err->num_warnings; /* Rows below the region are not decoded. */
}

/* Replacements for libjpeg-turbo's memory functions (jmemsys.h). The library's own versions are linked only if the program defines none.
 * Those versions call malloc, and glibc keeps up to 64 MiB of freed memory per thread. The coefficients of a progressive 12 MP file occupy
 * 36 MB. The functions here return large blocks to the kernel immediately. They must stay in this file, because the linker
 * reads it before the library. */
#define MAPPED_FROM_BYTES (1u << 20)

typedef union {
  size_t mapped_bytes; /* 0 if malloc allocated it. */
  char aligned[64];
} before_large;

void *jpeg_get_small(j_common_ptr info, size_t bytes) {
  (void)info;
  return malloc(bytes);
}

void jpeg_free_small(j_common_ptr info, void *memory, size_t bytes) {
  (void)info, (void)bytes;
  free(memory);
}

void *jpeg_get_large(j_common_ptr info, size_t bytes) {
  (void)info;
  if (bytes > SIZE_MAX - sizeof(before_large)) return NULL;
  size_t all = bytes + sizeof(before_large);
  int mapped = all >= MAPPED_FROM_BYTES;
  before_large *before = mapped ? mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : malloc(all);
  if (before == NULL || before == MAP_FAILED) return NULL;
  before->mapped_bytes = mapped ? all : 0;
  return before + 1;
}

void jpeg_free_large(j_common_ptr info, void *memory, size_t bytes) {
  (void)info, (void)bytes;
  before_large *before = (before_large *)memory - 1;
  if (before->mapped_bytes) munmap(before, before->mapped_bytes);
  else free(before);
}

size_t jpeg_mem_available(j_common_ptr info, size_t least, size_t most, size_t allocated) {
  (void)least;
  if (info->mem->max_memory_to_use == 0) return most;
  size_t limit = (size_t)info->mem->max_memory_to_use;
  return limit > allocated ? limit - allocated : 0;
}

void jpeg_open_backing_store(j_common_ptr info, void *store, long bytes) {
  (void)store, (void)bytes;
  ERREXIT(info, JERR_NO_BACKING_STORE);
}

long jpeg_mem_init(j_common_ptr info) {
  (void)info;
  return 0;
}

void jpeg_mem_term(j_common_ptr info) { (void)info; }
