/* An instruction that does nothing and that the counter knows: nopl with a number that nobody else would take. */
void _start(void)
{
    __asm__ volatile(".byte 0x0f, 0x1f, 0x84, 0x00, 'T', 'A', 'P', 'L'");
    __asm__ volatile("syscall" : : "a"(60), "D"(0) : "rcx", "r11");
    __builtin_unreachable();
}
