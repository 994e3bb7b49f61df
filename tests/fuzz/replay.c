/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A harness without libFuzzer: runs each file of the folder that it is given, then inputs made of them by a few simple
 * changes, the same ones in every run. `make check` runs the seeds so, in the build that it has anyway; finding new
 * inputs is libFuzzer's (scripts/fuzz.sh).
 *
 *     fuzz_NAME FOLDER [changed inputs]
 */
#include <dirent.h>

#include "fuzz.h"

enum { MOST_FILES = 1024, MOST_BYTES = 8192 };

static struct seed {
    uint8_t *data;
    size_t bytes;
} seeds[MOST_FILES];
static int count;
static uint64_t state = 88172645463325252ull;

static uint64_t draw(uint64_t n)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % n;
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int read_seed(const char *folder, const char *name)
{
    char path[1200];
    struct seed *seed = &seeds[count];
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    file = fopen(path, "rb");
    seed->data = malloc(MOST_BYTES);
    if (!file || !seed->data)
        return -1;
    seed->bytes = fread(seed->data, 1, MOST_BYTES, file);
    fclose(file);
    count++;
    return 0;
}

static int read_seeds(const char *folder)
{
    struct dirent **entries;
    int n = scandir(folder, &entries, NULL, by_name), rc = n < 0 ? -1 : 0;

    for (int i = 0; i < n; i++) {
        if (entries[i]->d_name[0] != '.' && count < MOST_FILES && read_seed(folder, entries[i]->d_name))
            rc = -1;
        free(entries[i]);
    }
    if (n >= 0)
        free(entries);
    return rc || !count ? -1 : 0;
}

/* In exact memory, so that AddressSanitizer sees a byte too many. */
static void run(const uint8_t *data, size_t bytes)
{
    uint8_t *exact = malloc(bytes ? bytes : 1);

    if (!exact)
        abort();
    memcpy(exact, data, bytes);
    LLVMFuzzerTestOneInput(exact, bytes);
    free(exact);
}

/* One seed's beginning and another's end, then bytes changed, now and then one left out. */
static void run_changed(void)
{
    const struct seed *a = &seeds[draw((uint64_t)count)], *b = &seeds[draw((uint64_t)count)];
    uint8_t data[2 * MOST_BYTES];
    size_t cut = draw(a->bytes + 1), from = draw(b->bytes + 1), bytes = cut + (b->bytes - from);

    memcpy(data, a->data, cut);
    memcpy(data + cut, b->data + from, b->bytes - from);
    for (uint64_t i = draw(6); i && bytes; i--) {
        const size_t at = draw(bytes);
        if (draw(8)) {
            data[at] = (uint8_t)(draw(2) ? draw(256) : data[at] ^ 1u << draw(8));
        } else {
            memmove(data + at, data + at + 1, bytes - at - 1);
            bytes--;
        }
    }
    run(data, bytes);
}

int main(int argc, char **argv)
{
    const char *scale = getenv("EPX_TEST_SCALE");
    long changed = argc > 2 ? strtol(argv[2], NULL, 10) : 0;

    if (argc < 2 || read_seeds(argv[1])) {
        fprintf(stderr, "usage: %s FOLDER [changed inputs]; the folder has at least one file\n", argv[0]);
        return 2;
    }
    if (scale)
        changed = (long)((double)changed * strtod(scale, NULL));
    LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 0; i < count; i++)
        run(seeds[i].data, seeds[i].bytes);
    for (long i = 0; i < changed; i++)
        run_changed();
    printf("%d seeds, %ld changed inputs\n", count, changed);
    for (int i = 0; i < count; i++)
        free(seeds[i].data);
    return 0;
}
