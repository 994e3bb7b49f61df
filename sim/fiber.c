/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A switch saves what the calling convention says a function must keep, on the stack that it leaves, and restores the
 * same from the stack that it enters: some ten nanoseconds, where swapcontext makes a system call. A new fiber's stack
 * is laid out as if it had left just before its first instruction. The sanitizers are told about every switch.
 */
#include "sim/fiber.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if !defined(__aarch64__) && !defined(__x86_64__)
#define FIBER_UCONTEXT 1
#endif
#ifdef FIBER_UCONTEXT
#include <ucontext.h>
#endif

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define FIBER_ASAN 1
#endif
#if __has_feature(thread_sanitizer)
#define FIBER_TSAN 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#define FIBER_ASAN 1
#endif
#ifdef __SANITIZE_THREAD__
#define FIBER_TSAN 1
#endif

#ifdef FIBER_ASAN
void __sanitizer_start_switch_fiber(void **fake, const void *bottom, size_t bytes);
void __sanitizer_finish_switch_fiber(void *fake, const void **bottom, size_t *bytes);
#endif
#ifdef FIBER_TSAN
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void *fiber);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
#endif

enum { STACK_BYTES = 256 * 1024 };

/* Where a stack was left. */
struct place {
#ifdef FIBER_UCONTEXT
    ucontext_t context;
#else
    void *stack;
#endif
    void *fake; /* AddressSanitizer's shadow of it */
    void *race; /* ThreadSanitizer's name for it */
};

struct fiber {
    struct place own, outer;
    char *memory; /* a guard page, then the stack */
    size_t bytes;
    void (*main)(void *);
    void *arg;
    const void *outer_bottom;
    size_t outer_bytes;
    struct fiber *next; /* in the pool */
};

static _Thread_local struct fiber *running;
static struct fiber *pool;

/* ---- The switch --------------------------------------------------------------------------------------------- */

#ifndef FIBER_UCONTEXT

/* Leaves on the stack of the caller, enters at `to`; *from says where to come back. */
void fiber_switch(void **from, void *to) __attribute__((visibility("hidden")));
/* First instruction of a fiber: a register that the switch restored holds it. */
void fiber_start(void) __attribute__((visibility("hidden")));

#if defined(__aarch64__)
__asm__(".text\n"
        ".p2align 4\n"
        ".hidden fiber_switch\n"
        ".globl fiber_switch\n"
        ".type fiber_switch, %function\n"
        "fiber_switch:\n"
        "  sub sp, sp, #160\n"
        "  stp x19, x20, [sp, #0]\n"
        "  stp x21, x22, [sp, #16]\n"
        "  stp x23, x24, [sp, #32]\n"
        "  stp x25, x26, [sp, #48]\n"
        "  stp x27, x28, [sp, #64]\n"
        "  stp x29, x30, [sp, #80]\n"
        "  stp d8, d9, [sp, #96]\n"
        "  stp d10, d11, [sp, #112]\n"
        "  stp d12, d13, [sp, #128]\n"
        "  stp d14, d15, [sp, #144]\n"
        "  mov x9, sp\n"
        "  str x9, [x0]\n"
        "  mov sp, x1\n"
        "  ldp x19, x20, [sp, #0]\n"
        "  ldp x21, x22, [sp, #16]\n"
        "  ldp x23, x24, [sp, #32]\n"
        "  ldp x25, x26, [sp, #48]\n"
        "  ldp x27, x28, [sp, #64]\n"
        "  ldp x29, x30, [sp, #80]\n"
        "  ldp d8, d9, [sp, #96]\n"
        "  ldp d10, d11, [sp, #112]\n"
        "  ldp d12, d13, [sp, #128]\n"
        "  ldp d14, d15, [sp, #144]\n"
        "  add sp, sp, #160\n"
        "  ret\n"
        ".size fiber_switch, .-fiber_switch\n"
        ".p2align 4\n"
        ".hidden fiber_start\n"
        ".globl fiber_start\n"
        ".type fiber_start, %function\n"
        "fiber_start:\n"
        "  mov x29, xzr\n" /* the end of every back trace */
        "  mov x30, xzr\n"
        "  br x19\n"
        ".size fiber_start, .-fiber_start\n");

static void *first_frame(char *top, void (*body)(void))
{
    uint64_t *frame = (uint64_t *)(void *)(top - 160);

    memset(frame, 0, 160);
    frame[0] = (uint64_t)(uintptr_t)body;         /* x19 */
    frame[11] = (uint64_t)(uintptr_t)fiber_start; /* x30 */
    return frame;
}
#else
__asm__(".text\n"
        ".p2align 4\n"
        ".hidden fiber_switch\n"
        ".globl fiber_switch\n"
        ".type fiber_switch, @function\n"
        "fiber_switch:\n"
        "  pushq %rbp\n"
        "  pushq %rbx\n"
        "  pushq %r12\n"
        "  pushq %r13\n"
        "  pushq %r14\n"
        "  pushq %r15\n"
        "  subq $8, %rsp\n"
        "  stmxcsr (%rsp)\n"
        "  fnstcw 4(%rsp)\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  ldmxcsr (%rsp)\n"
        "  fldcw 4(%rsp)\n"
        "  addq $8, %rsp\n"
        "  popq %r15\n"
        "  popq %r14\n"
        "  popq %r13\n"
        "  popq %r12\n"
        "  popq %rbx\n"
        "  popq %rbp\n"
        "  ret\n"
        ".size fiber_switch, .-fiber_switch\n"
        ".p2align 4\n"
        ".hidden fiber_start\n"
        ".globl fiber_start\n"
        ".type fiber_start, @function\n"
        "fiber_start:\n"
        "  xorl %ebp, %ebp\n" /* the end of every back trace */
        "  callq *%rbx\n"     /* a call, so that the stack is aligned as a function expects it */
        "  ud2\n"
        ".size fiber_start, .-fiber_start\n");

static void *first_frame(char *top, void (*body)(void))
{
    uint64_t *frame = (uint64_t *)(void *)(top - 80);
    uint32_t control;

    memset(frame, 0, 80);
    __asm__ volatile("stmxcsr %0" : "=m"(control));
    memcpy(frame, &control, 4);
    control = 0x37f; /* what a process starts with */
    memcpy((char *)frame + 4, &control, 4);
    frame[5] = (uint64_t)(uintptr_t)body;        /* rbx */
    frame[7] = (uint64_t)(uintptr_t)fiber_start; /* the return address */
    return frame;
}
#endif
#endif

static void place_switch(struct place *from, struct place *to, const void *bottom, size_t bytes, int last)
{
    (void)bottom, (void)bytes, (void)last;
#ifdef FIBER_ASAN
    __sanitizer_start_switch_fiber(last ? NULL : &from->fake, bottom, bytes);
#endif
#ifdef FIBER_TSAN
    __tsan_switch_to_fiber(to->race, 0);
#endif
#ifdef FIBER_UCONTEXT
    swapcontext(&from->context, &to->context);
#else
    fiber_switch(&from->stack, to->stack);
#endif
}

static char *stack_bottom(const struct fiber *f)
{
    return f->memory + (f->bytes - STACK_BYTES);
}

/* Runs on the new stack. */
static void body(void)
{
    struct fiber *f = running;

#ifdef FIBER_ASAN
    __sanitizer_finish_switch_fiber(NULL, &f->outer_bottom, &f->outer_bytes);
#endif
    f->main(f->arg);
}

/* ---- Fibers ------------------------------------------------------------------------------------------------- */

/* Stacks are kept: a simulation makes and ends many thousands. */
static struct fiber *fiber_memory(void)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct fiber *f = pool;

    if (f) {
        pool = f->next;
        return f;
    }
    f = calloc(1, sizeof(*f));
    if (!f)
        return NULL;
    f->bytes = STACK_BYTES + page;
    f->memory = mmap(NULL, f->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (f->memory == MAP_FAILED || mprotect(f->memory, page, PROT_NONE) != 0) {
        if (f->memory != MAP_FAILED)
            munmap(f->memory, f->bytes);
        free(f);
        return NULL;
    }
    return f;
}

struct fiber *fiber_new(void (*main)(void *), void *arg)
{
    struct fiber *f = fiber_memory();

    if (!f)
        return NULL;
    memset(&f->own, 0, sizeof(f->own));
    f->main = main;
    f->arg = arg;
#ifdef FIBER_UCONTEXT
    getcontext(&f->own.context);
    f->own.context.uc_stack.ss_sp = stack_bottom(f);
    f->own.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&f->own.context, body, 0);
#else
    f->own.stack = first_frame(f->memory + f->bytes, body);
#endif
#ifdef FIBER_TSAN
    f->own.race = __tsan_create_fiber(0);
#endif
    return f;
}

void fiber_free(struct fiber *fiber)
{
    if (!fiber)
        return;
#ifdef FIBER_TSAN
    __tsan_destroy_fiber(fiber->own.race);
#endif
    fiber->next = pool;
    pool = fiber;
}

__attribute__((destructor)) static void free_pool(void)
{
    while (pool) {
        struct fiber *f = pool;

        pool = f->next;
        munmap(f->memory, f->bytes);
        free(f);
    }
}

void fiber_enter(struct fiber *fiber)
{
    running = fiber;
#ifdef FIBER_TSAN
    fiber->outer.race = __tsan_get_current_fiber();
#endif
    place_switch(&fiber->outer, &fiber->own, stack_bottom(fiber), STACK_BYTES, 0);
#ifdef FIBER_ASAN
    __sanitizer_finish_switch_fiber(fiber->outer.fake, NULL, NULL);
#endif
    running = NULL;
}

void fiber_leave(int last)
{
    struct fiber *f = running;

    place_switch(&f->own, &f->outer, f->outer_bottom, f->outer_bytes, last);
#ifdef FIBER_ASAN
    __sanitizer_finish_switch_fiber(f->own.fake, &f->outer_bottom, &f->outer_bytes);
#endif
}
