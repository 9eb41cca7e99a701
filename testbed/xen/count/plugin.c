/*
 * Counts the instructions that the machine executes, by block of translated code: a plugin of QEMU (docs/devel/tcg-plugins.rst,
 * version 1 of the interface, whose header no package of Debian has).
 *
 * At each mark (mark.c) all counts are written to PATH.0, PATH.1, …, a block a line: its address as the code has it, where it
 * lies in QEMU's memory (which tells the kernels of two domains apart), instructions in it, instructions executed.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef uint64_t plugin_id;
struct qemu_plugin_tb;
struct qemu_plugin_insn;

void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int operation, void *number, uint64_t more);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, void (*)(unsigned cpu, void *), int flags, void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
void *qemu_plugin_insn_haddr(const struct qemu_plugin_insn *);

EXPORT int qemu_plugin_version = 1;

struct block {
    uint64_t address, place, length, executed;
    struct block *next;
};

static struct block *blocks[1 << 18];
static char path[4096];
static int marks;

/* The same code may be translated again, and goes on with its count. */
static struct block *find(uint64_t address, uint64_t place, uint64_t length)
{
    uint64_t hash = (address * 0x9e3779b97f4a7c15 ^ place * 0xc2b2ae3d27d4eb4f ^ length) >> 46;
    struct block *block = blocks[hash];
    while (block && (block->address != address || block->place != place || block->length != length))
        block = block->next;
    if (!block) {
        block = calloc(1, sizeof *block);
        if (!block)
            abort();
        *block = (struct block){ address, place, length, 0, blocks[hash] };
        blocks[hash] = block;
    }
    return block;
}

static void marked(unsigned cpu, void *unused)
{
    (void)cpu, (void)unused;
    char name[sizeof path + 16];
    snprintf(name, sizeof name, "%s.%d", path, marks++);
    FILE *file = fopen(name, "w");
    if (!file) {
        perror(name);
        abort();
    }
    for (size_t bucket = 0; bucket < sizeof blocks / sizeof *blocks; bucket++)
        for (struct block *block = blocks[bucket]; block; block = block->next)
            if (block->executed)
                fprintf(file, "%" PRIx64 " %" PRIx64 " %" PRIx64 " %" PRIx64 "\n", block->address, block->place,
                        block->length, block->executed);
    if (fclose(file))
        abort();
}

static void translated(plugin_id id, struct qemu_plugin_tb *tb)
{
    (void)id;
    size_t length = qemu_plugin_tb_n_insns(tb);
    struct qemu_plugin_insn *first = qemu_plugin_tb_get_insn(tb, 0);
    struct block *block = find(qemu_plugin_insn_vaddr(first), (uintptr_t)qemu_plugin_insn_haddr(first), length);
    for (size_t index = 0; index < length; index++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, index);
        if (qemu_plugin_insn_size(insn) == 8 && !memcmp(qemu_plugin_insn_data(insn), "\x0f\x1f\x84\x00TAPL", 8))
            qemu_plugin_register_vcpu_insn_exec_cb(insn, marked, 0, NULL);
    }
    qemu_plugin_register_vcpu_tb_exec_inline(tb, 0, &block->executed, length);
}

EXPORT int qemu_plugin_install(plugin_id id, const void *info, int count, char **words)
{
    (void)info;
    for (int word = 0; word < count; word++)
        if (!strncmp(words[word], "out=", 4))
            snprintf(path, sizeof path, "%s", words[word] + 4);
    if (!*path)
        return -1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    return 0;
}
