/* Scanner of NCCL logs: finds the lines of a block, reads the numbers of operation lines, and numbers all other texts.

   commprof/nccl/grammar/lines.py is the reference for the meaning of lines. This file decides only certain cases. It
   passes each distinct head, message and tail of operation lines to Python once, and marks every irregular line for the
   line reader. A block may contain any bytes. No byte outside of the block is read. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__) && !defined(COMMPROF_PLAIN)
#include <emmintrin.h>
#define VECTORS 1
#endif

#define VERSION 1 /* the version that commprof/nccl/scan.py expects; incremented with every change of the interface */
#define SHAPE_BYTES 300    /* equal to _LOOKED_AT in line_kinds.py */
#define EXAMPLE_BYTES 240  /* equal to _SHOWN_BYTES in census.py */
#define EXAMPLES 3
#define KINDS 64
#define NO_OPCOUNT (-2147483648LL) /* equal to NONE in op_buffer.py */

typedef const uint8_t *Place;

/* The first numbers of texts are reserved for lines without a text. */
enum { BLANK, FOREIGN, NOT_TEXT, UNREAD, RESERVED };

typedef struct {
    char *data;
    size_t used, room;
} Buffer;

typedef struct {
    int32_t begin, end, message; /* positions; end is the position of the newline */
    int32_t head, text;          /* numbers of texts */
} Line;

typedef struct {
    int64_t line, opcount;
    uint64_t sendbuff, recvbuff;
    int64_t elements;
} Operation;

typedef struct {
    size_t begin, length;
    uint64_t hash;
} Text;

typedef struct {
    PyObject_HEAD
    Buffer lines, operations; /* the results for the last block */
    Buffer bytes, texts;      /* the distinct texts; a byte with its type precedes each text */
    uint32_t *slots;          /* a hash table with the numbers of texts; 0 for an empty slot */
    size_t num_slots;
    size_t known; /* the number of texts that were returned to Python */
    int busy;
} Scanner;

/* The marks found in the bytes of a line. */
typedef struct {
    size_t begin, head; /* the position of the line, and of the space before NCCL */
    int heads, controls, high, carriage;
} Look;

static int
reserve(Buffer *buffer, size_t more)
{
    if (buffer->room - buffer->used >= more) {
        return 0;
    }
    size_t room = buffer->room * 2 > buffer->used + more ? buffer->room * 2 : buffer->used + more + 4096;
    char *data = PyMem_RawRealloc(buffer->data, room);
    if (data == NULL) {
        return -1;
    }
    buffer->data = data;
    buffer->room = room;
    return 0;
}

static size_t
num_texts(const Scanner *self)
{
    return self->texts.used / sizeof(Text);
}

static uint64_t
mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * 0xD6E8FEB86659FD93u;
    return hash ^ hash >> 32;
}

static uint64_t
word_at(Place text)
{
    uint64_t word;
    memcpy(&word, text, 8);
    return word;
}

static uint64_t
hash_of(char tag, Place text, size_t length)
{
    uint64_t first = (uint64_t)length * 0x9E3779B97F4A7C15u + (uint8_t)tag, second = 0x9E3779B97F4A7C15u;
    size_t at = 0;
    for (; at + 16 <= length; at += 16) { /* two chains, which the processor computes in parallel */
        first = mix(first, word_at(text + at));
        second = mix(second, word_at(text + at + 8));
    }
    if (length >= 16) { /* some bytes are hashed twice */
        first = mix(first, word_at(text + length - 16));
        second = mix(second, word_at(text + length - 8));
    }
    else if (length >= 8) {
        first = mix(first, word_at(text));
        second = mix(second, word_at(text + length - 8));
    }
    else if (length) {
        uint64_t word = 0;
        memcpy(&word, text, length);
        first = mix(first, word);
    }
    first = mix(first, second);
    return first ^ first >> 29;
}

static int
grow_slots(Scanner *self, size_t num_slots)
{
    uint32_t *slots = PyMem_RawCalloc(num_slots, sizeof *slots);
    if (slots == NULL) {
        return -1;
    }
    const Text *texts = (const Text *)self->texts.data;
    for (size_t number = RESERVED; number < num_texts(self); number++) {
        size_t slot = texts[number].hash & (num_slots - 1);
        while (slots[slot]) {
            slot = (slot + 1) & (num_slots - 1);
        }
        slots[slot] = (uint32_t)number;
    }
    PyMem_RawFree(self->slots);
    self->slots = slots;
    self->num_slots = num_slots;
    return 0;
}

/* Return the number of a text, which is added if it is new; -1 if there is no memory. */
static int32_t
number_of(Scanner *self, char tag, Place text, size_t length)
{
    uint64_t hash = hash_of(tag, text, length);
    size_t mask = self->num_slots - 1, slot = hash & mask;
    const Text *texts = (const Text *)self->texts.data;
    for (; self->slots[slot]; slot = (slot + 1) & mask) {
        const Text *known = texts + self->slots[slot];
        if (known->hash == hash && known->length == length + 1) {
            const char *data = self->bytes.data + known->begin;
            if (data[0] == tag && memcmp(data + 1, text, length) == 0) {
                return (int32_t)self->slots[slot];
            }
        }
    }
    size_t number = num_texts(self);
    if (number >= INT32_MAX || reserve(&self->bytes, length + 1) < 0 || reserve(&self->texts, sizeof(Text)) < 0 ||
        (number * 2 > self->num_slots && grow_slots(self, self->num_slots * 2) < 0)) {
        return -1;
    }
    Text added = {self->bytes.used, length + 1, hash};
    self->bytes.data[added.begin] = tag;
    memcpy(self->bytes.data + added.begin + 1, text, length);
    self->bytes.used += added.length;
    memcpy(self->texts.data + self->texts.used, &added, sizeof added);
    self->texts.used += sizeof added;
    mask = self->num_slots - 1;
    for (slot = hash & mask; self->slots[slot]; slot = (slot + 1) & mask) {
    }
    self->slots[slot] = (uint32_t)number;
    return (int32_t)number;
}

static int
is_digit(uint8_t byte)
{
    return byte >= '0' && byte <= '9';
}

static int
hex_value(uint8_t byte)
{
    return is_digit(byte) ? byte - '0' : byte >= 'a' && byte <= 'f' ? byte - 'a' + 10 : -1;
}

static int
is_word(uint8_t byte)
{
    return is_digit(byte) || byte == '_' || ((byte | 32) >= 'a' && (byte | 32) <= 'z');
}

/* Each of the following functions returns the position after the text that it read. It returns NULL if the text has
   another form or if `at` is NULL. */

static Place
literal(Place at, Place end, const char *text, size_t length)
{
    return at != NULL && (size_t)(end - at) >= length && memcmp(at, text, length) == 0 ? at + length : NULL;
}
#define LITERAL(at, end, text) literal(at, end, text, sizeof(text) - 1)

static Place
hexadecimal(Place at, Place end, int most, uint64_t *value)
{
    int digits = 0, digit;
    *value = 0;
    for (; at != NULL && at < end && (digit = hex_value(*at)) >= 0; at++) {
        if (++digits > most) {
            return NULL;
        }
        *value = *value << 4 | (uint64_t)digit;
    }
    return digits ? at : NULL;
}

static Place
decimal(Place at, Place end, int most, int64_t *value)
{
    int digits = 0;
    *value = 0;
    for (; at != NULL && at < end && is_digit(*at); at++) {
        if (++digits > most) {
            return NULL;
        }
        *value = *value * 10 + (*at - '0');
    }
    return digits ? at : NULL;
}

/* Read a pointer in the form of %p. (nil) is 0. Any other text for 0 is refused. */
static Place
pointer(Place at, Place end, uint64_t *value)
{
    Place nil = LITERAL(at, end, "(nil)");
    if (nil != NULL) {
        *value = 0;
        return nil;
    }
    at = hexadecimal(LITERAL(at, end, "0x"), end, 16, value);
    return at != NULL && *value ? at : NULL;
}

/* Read the name of a COLL line: `AllReduce: `, `[3] AllReduce: ` */
static Place
coll_name(Place at, Place end)
{
    if (at < end && *at == '[') {
        Place digits = ++at;
        while (at < end && is_digit(*at)) {
            at++;
        }
        at = at > digits ? LITERAL(at, end, "] ") : NULL;
    }
    Place name = at;
    while (at != NULL && at < end && is_word(*at)) {
        at++;
    }
    return at != name ? LITERAL(at, end, ": ") : NULL;
}

/* Read the fields of a COLL line from opCount up to the count. A space must follow the count. */
static Place
coll_fields(Place at, Place end, Operation *found)
{
    uint64_t opcount = 0;
    at = hexadecimal(LITERAL(at, end, "opCount "), end, 15, &opcount);
    found->opcount = (int64_t)opcount;
    at = pointer(LITERAL(at, end, " sendbuff "), end, &found->sendbuff);
    at = pointer(LITERAL(at, end, " recvbuff "), end, &found->recvbuff);
    Place accumulator = LITERAL(at, end, " acc ");
    if (accumulator != NULL) { /* printed by RCCL only */
        for (at = accumulator; at < end && *at != ' ' && *at != '\t'; at++) {
        }
        at = at - accumulator >= 1 && at - accumulator <= 20 ? at : NULL;
    }
    at = decimal(LITERAL(at, end, " count "), end, 18, &found->elements);
    return at != NULL && at < end && *at == ' ' ? at : NULL;
}

/* Read the name of a CALL line: `ncclAllReduce(` */
static Place
call_name(Place at, Place end)
{
    Place name = at = LITERAL(at, end, "nccl");
    while (at != NULL && at < end && is_word(*at)) {
        at++;
    }
    return at != name ? LITERAL(at, end, "(") : NULL;
}

/* Read the first three arguments of a CALL line. A comma must follow them. */
static Place
call_fields(Place at, Place end, Operation *found)
{
    found->opcount = NO_OPCOUNT;
    at = hexadecimal(at, end, 16, &found->sendbuff);
    at = hexadecimal(LITERAL(at, end, ","), end, 16, &found->recvbuff);
    at = decimal(LITERAL(at, end, ","), end, 18, &found->elements);
    return at != NULL && at < end && *at == ',' ? at : NULL;
}

/* Return whether a mark begins at `at`. Every line that has a message but no head contains a mark. */
static int
is_headless_mark(Place at, Place end)
{
    switch (*at) {
    case ':':
        return LITERAL(at, end, ": o") != NULL;
    case '[':
        return LITERAL(at, end, "[nranks=") != NULL;
    case 'N':
        return LITERAL(at, end, "NCCL version") || LITERAL(at, end, "NCCL CALL nccl");
    case ' ':
        return LITERAL(at, end, " created ncclComm_ ") != NULL;
    default:
        return 0;
    }
}

/* Return whether a text without a head may contain a message. */
static int
may_speak_headless(Place text, Place end)
{
    Place at = text;
#ifdef VECTORS
    const __m128i colon = _mm_set1_epi8(':'), o = _mm_set1_epi8('o'), bracket = _mm_set1_epi8('[');
    const __m128i big_n = _mm_set1_epi8('N'), big_c = _mm_set1_epi8('C'), space = _mm_set1_epi8(' ');
    const __m128i c = _mm_set1_epi8('c'), n = _mm_set1_epi8('n');
    for (; end - at >= 18; at += 16) { /* a mark is longer than two bytes */
        __m128i bytes = _mm_loadu_si128((const __m128i *)at);
        __m128i next = _mm_loadu_si128((const __m128i *)(at + 1)), third = _mm_loadu_si128((const __m128i *)(at + 2));
        __m128i marks = _mm_and_si128(_mm_cmpeq_epi8(bytes, colon), _mm_cmpeq_epi8(third, o));
        marks = _mm_or_si128(marks, _mm_and_si128(_mm_cmpeq_epi8(bytes, bracket), _mm_cmpeq_epi8(next, n)));
        marks = _mm_or_si128(marks, _mm_and_si128(_mm_cmpeq_epi8(bytes, big_n), _mm_cmpeq_epi8(next, big_c)));
        marks = _mm_or_si128(marks, _mm_and_si128(_mm_cmpeq_epi8(bytes, space), _mm_cmpeq_epi8(next, c)));
        for (unsigned bits = (unsigned)_mm_movemask_epi8(marks); bits; bits &= bits - 1) {
            if (is_headless_mark(at + __builtin_ctz(bits), end)) {
                return 1;
            }
        }
    }
#endif
    for (; at < end; at++) {
        if (is_headless_mark(at, end)) {
            return 1;
        }
    }
    return 0;
}

/* Return whether `at` is the last byte of a mark in the message from `text` to `end`. Every message with values
   contains a mark, except for messages that may_have_values() recognizes by their beginning. */
static int
is_mark(Place at, Place text, Place end)
{
    size_t before = (size_t)(at - text);
    switch (*at) {
    case '|':
        return 1;
    case 'o':
        return before >= 2 && at[-1] == ' ' && at[-2] == ':';
    case 'x':
        return before >= 6 && memcmp(at - 6, "comm 0", 6) == 0;
    case 'l':
        return before >= 3 && memcmp(at - 3, "ncc", 3) == 0;
    case 'L':
        return before >= 3 && memcmp(at - 3, "NCC", 3) == 0 && at + 1 < end && at[1] == ' ';
    case '>': {
        if (before < 3 || at[-1] != '-' || at[-2] != ' ' || at + 1 >= end || at[1] != ' ') {
            return 0;
        }
        Place digit = at - 2;
        while (digit > text && is_digit(digit[-1])) {
            digit--;
        }
        size_t digits = (size_t)(at - 2 - digit);
        return (digits >= 1 && digits <= 9 && digit > text && digit[-1] == ':') ||
               (before >= 7 && memcmp(at - 7, "Bytes", 5) == 0);
    }
    default:
        return 0;
    }
}

/* Return whether a message of level INFO may have values. If it has none, store the beginning of the message in
   `shape`, with 0 for each digit and for each hexadecimal digit after 0x. The topic does not depend on the digits. */
static int
may_have_values(Place text, Place end, uint8_t *shape)
{
    size_t length = (size_t)(end - text), at = 0;
    if (LITERAL(text, end, "Channel ") || LITERAL(text, end, "Ring ") || LITERAL(text, end, "Tree")) {
        return 1;
    }
    size_t addresses[SHAPE_BYTES];
    size_t num_addresses = 0;
#ifdef VECTORS
    const __m128i bar = _mm_set1_epi8('|'), more = _mm_set1_epi8('>'), x = _mm_set1_epi8('x'), o = _mm_set1_epi8('o');
    const __m128i l = _mm_set1_epi8('l'), c = _mm_set1_epi8('c'), big_l = _mm_set1_epi8('L'), space = _mm_set1_epi8(' ');
    const __m128i zero = _mm_set1_epi8('0'), ten = _mm_set1_epi8(10 - 128), base = _mm_set1_epi8((char)('0' + 128));
    for (; at + 16 <= length; at += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(text + at));
        __m128i before = at ? _mm_loadu_si128((const __m128i *)(text + at - 1)) : _mm_slli_si128(bytes, 1);
        __m128i marks = _mm_or_si128(_mm_cmpeq_epi8(bytes, bar), _mm_cmpeq_epi8(bytes, more));
        marks = _mm_or_si128(marks, _mm_or_si128(_mm_cmpeq_epi8(bytes, x), _mm_cmpeq_epi8(bytes, big_l)));
        marks = _mm_or_si128(marks, _mm_and_si128(_mm_cmpeq_epi8(bytes, l), _mm_cmpeq_epi8(before, c)));
        marks = _mm_or_si128(marks, _mm_and_si128(_mm_cmpeq_epi8(bytes, o), _mm_cmpeq_epi8(before, space)));
        for (unsigned bits = (unsigned)_mm_movemask_epi8(marks); bits; bits &= bits - 1) {
            size_t place = at + (size_t)__builtin_ctz(bits);
            if (is_mark(text + place, text, end)) {
                return 1;
            }
            if (text[place] == 'x' && place && text[place - 1] == '0' && place < SHAPE_BYTES) {
                addresses[num_addresses++] = place + 1;
            }
        }
        if (at < SHAPE_BYTES) {
            /* byte - '0' - 128 is below 10 - 128, as signed numbers, for digits only */
            __m128i digits = _mm_cmplt_epi8(_mm_sub_epi8(bytes, base), ten);
            bytes = _mm_or_si128(_mm_and_si128(digits, zero), _mm_andnot_si128(digits, bytes));
            _mm_storeu_si128((__m128i *)(shape + at), bytes);
        }
    }
#endif
    for (; at < length; at++) {
        if (is_mark(text + at, text, end)) {
            return 1;
        }
        if (at < SHAPE_BYTES) {
            shape[at] = is_digit(text[at]) ? '0' : text[at];
            if (text[at] == 'x' && at && text[at - 1] == '0') {
                addresses[num_addresses++] = at + 1;
            }
        }
    }
    size_t shown = length < SHAPE_BYTES ? length : SHAPE_BYTES;
    for (size_t number = 0; number < num_addresses; number++) {
        for (size_t place = addresses[number]; place < shown && hex_value(shape[place]) >= 0; place++) {
            shape[place] = '0';
        }
    }
    return 0;
}

/* Return whether a text is UTF-8. A truncated character at the end of the text is allowed. */
static int
is_text(Place at, Place end)
{
    while (at < end) {
        uint8_t first = *at++, low = 0x80, high = 0xBF;
        int more = first < 0x80 ? 0 : first < 0xC2 ? -1 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : first < 0xF5 ? 3 : -1;
        if (more < 0) {
            return 0;
        }
        low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : low;
        high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : high;
        for (; more && at < end; more--, at++, low = 0x80, high = 0xBF) {
            if (*at < low || *at > high) {
                return 0;
            }
        }
    }
    return 1;
}

/* Return the last space before `at`, or NULL. */
static Place
space_before(Place begin, Place at)
{
    while (at > begin) {
        if (*--at == ' ') {
            return at;
        }
    }
    return NULL;
}

/* Read a line with one head, of level INFO or CALL, and without control bytes. Return -1 if there is no memory. */
static int
read_regular(Scanner *self, Place data, const Look *look, Place end, Line *line)
{
    Place begin = data + look->begin, nccl = data + look->head;
    int is_call = nccl[6] == 'C';
    Place message = nccl + sizeof(" NCCL INFO ") - 1;
    /* The head is host:pid:tid [device], or one word before CALL. Text before the head, such as a time, is not from
       NCCL. */
    Place head = is_call ? nccl : space_before(begin, nccl);
    head = head == NULL ? NULL : space_before(begin, head);
    head = head == NULL ? begin : head + 1;
    if (head > begin && may_speak_headless(begin, head)) {
        return 0;
    }
    Operation found = {0};
    Place fields = is_call ? call_name(message, end) : coll_name(message, end);
    Place tail = fields == NULL ? NULL : is_call ? call_fields(fields, end, &found) : coll_fields(fields, end, &found);
    char tag = 'T';
    uint8_t shape[SHAPE_BYTES + 16];
    Place text = tail;
    size_t length = tail == NULL ? 0 : (size_t)(end - tail);
    if (tail == NULL) {
        fields = text = message;
        length = (size_t)(end - message);
        tag = is_call ? 'C' : 'I';
        if (!is_call && !may_have_values(message, end, shape)) {
            tag = 'S';
            text = shape;
            length = length < SHAPE_BYTES ? length : SHAPE_BYTES;
        }
    }
    line->head = number_of(self, 'H', head, (size_t)(fields - head));
    line->text = number_of(self, tag, text, length);
    line->message = (int32_t)(message - data);
    if (line->head < 0 || line->text < 0) {
        return -1;
    }
    if (tail != NULL) {
        if (reserve(&self->operations, sizeof found) < 0) {
            return -1;
        }
        found.line = (int64_t)(self->lines.used / sizeof(Line));
        memcpy(self->operations.data + self->operations.used, &found, sizeof found);
        self->operations.used += sizeof found;
    }
    return 0;
}

static int
add_line(Scanner *self, Place data, const Look *look, size_t newline)
{
    Place begin = data + look->begin, end = data + newline - look->carriage;
    Line line = {(int32_t)look->begin, (int32_t)newline, (int32_t)look->begin, UNREAD, UNREAD};
    if (!look->controls && !look->heads) {
        line.text = begin == end                                             ? BLANK
                    : may_speak_headless(begin, end)                         ? UNREAD
                    : !look->high || is_text(begin, data + newline) ? FOREIGN
                                                                             : NOT_TEXT;
        line.head = line.text;
    }
    else if (!look->controls && look->heads == 1 &&
             (LITERAL(data + look->head, end, " NCCL INFO ") || LITERAL(data + look->head, end, " NCCL CALL ")) &&
             read_regular(self, data, look, end, &line) < 0) {
        return -1;
    }
    if (reserve(&self->lines, sizeof line) < 0) {
        return -1;
    }
    memcpy(self->lines.data + self->lines.used, &line, sizeof line);
    self->lines.used += sizeof line;
    return 0;
}

/* Record a byte that is not plain text, or the N of NCCL. At a newline, add the line that ends there. */
static int
look_at(Scanner *self, Place data, size_t length, size_t at, Look *look)
{
    uint8_t byte = data[at];
    if (byte == '\n') {
        if (add_line(self, data, look, at) < 0) {
            return -1;
        }
        *look = (Look){.begin = at + 1};
    }
    else if (byte == 'N') {
        Place level = LITERAL(data + at, data + length, "NCCL ");
        if (level != NULL && (size_t)(data + length - level) >= 4 &&
            (!memcmp(level, "INFO", 4) || !memcmp(level, "CALL", 4) || !memcmp(level, "WARN", 4) ||
             !memcmp(level, "TRAC", 4) || !memcmp(level, "ABOR", 4))) {
            look->head = at - 1;
            look->heads++;
        }
    }
    else if (byte >= 0x80) {
        look->high = 1;
    }
    else if (byte == '\r' && (at + 1 == length || data[at + 1] == '\n')) {
        look->carriage = 1;
    }
    else if (byte != '\t') {
        look->controls = 1;
    }
    return 0;
}

static int
scan_block(Scanner *self, Place data, size_t length)
{
    Look look = {0};
    size_t at = 0;
    self->lines.used = self->operations.used = 0;
#ifdef VECTORS
    const __m128i space = _mm_set1_epi8(' '), rubout = _mm_set1_epi8(0x7F), big_n = _mm_set1_epi8('N');
    unsigned carry = 0;
    for (; at + 16 <= length; at += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(data + at));
        /* as signed numbers, control bytes and bytes from 0x80 on are smaller than a space */
        __m128i odd = _mm_or_si128(_mm_cmplt_epi8(bytes, space), _mm_cmpeq_epi8(bytes, rubout));
        unsigned spaces = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, space));
        unsigned bits = (unsigned)_mm_movemask_epi8(_mm_cmpeq_epi8(bytes, big_n)) & (spaces << 1 | carry);
        carry = spaces >> 15;
        for (bits |= (unsigned)_mm_movemask_epi8(odd); bits; bits &= bits - 1) {
            if (look_at(self, data, length, at + (size_t)__builtin_ctz(bits), &look) < 0) {
                return -1;
            }
        }
    }
#endif
    for (; at < length; at++) {
        uint8_t byte = data[at];
        if (byte < ' ' || byte >= 0x7F || (byte == 'N' && at && data[at - 1] == ' ')) {
            if (look_at(self, data, length, at, &look) < 0) {
                return -1;
            }
        }
    }
    return look.begin < length ? add_line(self, data, &look, length) : 0;
}

/* Lock the scanner for one call, because the call may release the GIL and let other threads run. */
static int
enter(Scanner *self)
{
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "the scanner reads a block in another thread");
        return -1;
    }
    self->busy = 1;
    return 0;
}

PyDoc_STRVAR(scan_doc,
             "scan($self, block, /)\n--\n\n"
             "Read a block of whole lines; the last may lack its newline.\n\n"
             "Returns the lines (five int32 each: begin, end, begin of the message, numbers of head and text), the operation\n"
             "lines (five int64 each: line, opcount, sendbuff, recvbuff, elements), and the texts that are new, each behind\n"
             "a byte: H head, T end of an operation line, I and C message of level INFO or CALL, S shape of one of INFO.");

static PyObject *
scanner_scan(Scanner *self, PyObject *block)
{
    Py_buffer view;
    if (enter(self) < 0) {
        return NULL;
    }
    if (PyObject_GetBuffer(block, &view, PyBUF_SIMPLE) < 0) {
        self->busy = 0;
        return NULL;
    }
    PyObject *result = NULL, *lines = NULL, *operations = NULL, *news = NULL;
    int failed = 0;
    if (view.len >= INT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "a block of %zd bytes; expected less than 2 GiB", view.len);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    failed = scan_block(self, view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS
    if (failed) {
        PyErr_NoMemory();
        goto done;
    }
    size_t number = num_texts(self);
    lines = PyBytes_FromStringAndSize(self->lines.data, (Py_ssize_t)self->lines.used);
    operations = PyBytes_FromStringAndSize(self->operations.data, (Py_ssize_t)self->operations.used);
    news = PyList_New((Py_ssize_t)(number - self->known));
    if (lines == NULL || operations == NULL || news == NULL) {
        goto done;
    }
    for (size_t next = self->known; next < number; next++) {
        const Text *text = (const Text *)self->texts.data + next;
        PyObject *bytes = PyBytes_FromStringAndSize(self->bytes.data + text->begin, (Py_ssize_t)text->length);
        if (bytes == NULL) {
            goto done;
        }
        PyList_SET_ITEM(news, (Py_ssize_t)(next - self->known), bytes);
    }
    self->known = number;
    result = PyTuple_Pack(3, lines, operations, news);
done:
    Py_XDECREF(lines);
    Py_XDECREF(operations);
    Py_XDECREF(news);
    PyBuffer_Release(&view);
    self->busy = 0;
    return result;
}

/* Add a line to the examples of its kind if no example has the same message. A line without a head is always added. */
static void
add_example(const Line **examples, int *count, Place data, const Line *line)
{
    for (int each = 0; each < *count && line->head >= RESERVED; each++) {
        const Line *other = examples[each];
        size_t length = (size_t)(line->end - line->message), others = (size_t)(other->end - other->message);
        length -= length && data[line->end - 1] == '\r';
        others -= others && data[other->end - 1] == '\r';
        length = length < EXAMPLE_BYTES ? length : EXAMPLE_BYTES;
        others = others < EXAMPLE_BYTES ? others : EXAMPLE_BYTES;
        if (other->head >= RESERVED && length == others && !memcmp(data + line->message, data + other->message, length)) {
            return;
        }
    }
    examples[(*count)++] = line;
}

/* Return the entry of one kind in the result of tally(). */
static PyObject *
kind_entry(int kind, int64_t times, const Line *lines, const Line **examples, int count)
{
    PyObject *shown = PyTuple_New(count);
    for (int each = 0; shown != NULL && each < count; each++) {
        PyObject *line = PyLong_FromSsize_t(examples[each] - lines);
        if (line == NULL) {
            Py_CLEAR(shown);
            break;
        }
        PyTuple_SET_ITEM(shown, each, line);
    }
    return shown == NULL ? NULL : Py_BuildValue("(iLN)", kind, (long long)times, shown);
}

PyDoc_STRVAR(tally_doc,
             "tally(block, lines, kinds, /)\n--\n\n"
             "Count the lines that scan() returned for a block by kind, an int8 for each line, negative for none.\n\n"
             "Returns for each kind its number, its lines, and the first three that differ in their messages.");

static PyObject *
tally(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer block, found, kinds;
    if (!PyArg_ParseTuple(args, "y*y*y*:tally", &block, &found, &kinds)) {
        return NULL;
    }
    PyObject *result = NULL;
    const Line *lines = found.buf;
    Py_ssize_t number = found.len / (Py_ssize_t)sizeof(Line);
    int64_t times[KINDS] = {0};
    const Line *examples[KINDS][EXAMPLES];
    int count[KINDS] = {0};
    if (kinds.len != number || (uintptr_t)lines % _Alignof(Line)) {
        PyErr_Format(PyExc_ValueError, "%zd kinds for %zd lines; expected one for each", kinds.len, number);
        goto done;
    }
    for (Py_ssize_t each = 0; each < number; each++) {
        int kind = ((const int8_t *)kinds.buf)[each];
        if (kind < 0 || kind >= KINDS) {
            continue;
        }
        times[kind]++;
        if (count[kind] < EXAMPLES) {
            const Line *line = lines + each;
            if (line->message < 0 || line->end < line->message || line->end > block.len) {
                PyErr_Format(PyExc_ValueError, "line %zd is not in the block of %zd bytes", each, block.len);
                goto done;
            }
            add_example(examples[kind], &count[kind], block.buf, line);
        }
    }
    result = PyList_New(0);
    for (int kind = 0; result != NULL && kind < KINDS; kind++) {
        if (times[kind]) {
            PyObject *entry = kind_entry(kind, times[kind], lines, examples[kind], count[kind]);
            if (entry == NULL || PyList_Append(result, entry) < 0) {
                Py_CLEAR(result);
            }
            Py_XDECREF(entry);
        }
    }
done:
    PyBuffer_Release(&block);
    PyBuffer_Release(&found);
    PyBuffer_Release(&kinds);
    return result;
}

PyDoc_STRVAR(forget_doc, "forget($self, /)\n--\n\nForget all texts: those to come are numbered anew.");

static PyObject *
scanner_forget(Scanner *self, PyObject *Py_UNUSED(none))
{
    if (enter(self) < 0) {
        return NULL;
    }
    self->bytes.used = 0;
    self->texts.used = RESERVED * sizeof(Text);
    self->known = RESERVED;
    memset(self->slots, 0, self->num_slots * sizeof *self->slots);
    self->busy = 0;
    Py_RETURN_NONE;
}

static PyObject *
scanner_size(Scanner *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->bytes.used + self->texts.used);
}

static int
scanner_init(Scanner *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, ":Scanner", names)) {
        return -1;
    }
    if (self->slots != NULL) {
        return 0;
    }
    if (reserve(&self->texts, RESERVED * sizeof(Text)) < 0 || reserve(&self->bytes, 1) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    memset(self->texts.data, 0, RESERVED * sizeof(Text));
    self->texts.used = RESERVED * sizeof(Text);
    self->known = RESERVED;
    if (grow_slots(self, 1 << 12) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *
scanner_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *self = PyType_GenericNew(type, args, keywords);
    if (self != NULL && scanner_init((Scanner *)self, args, keywords) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

static void
scanner_dealloc(Scanner *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyMem_RawFree(self->lines.data);
    PyMem_RawFree(self->operations.data);
    PyMem_RawFree(self->bytes.data);
    PyMem_RawFree(self->texts.data);
    PyMem_RawFree(self->slots);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"scan", (PyCFunction)scanner_scan, METH_O, scan_doc},
    {"forget", (PyCFunction)scanner_forget, METH_NOARGS, forget_doc},
    {NULL},
};

static PyGetSetDef attributes[] = {
    {"size", (getter)scanner_size, NULL, "Bytes that the distinct texts take.", NULL},
    {NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Scanner()\n--\n\nReads blocks of log lines; remembers which texts it met."},
    {Py_tp_new, scanner_new},
    {Py_tp_dealloc, scanner_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0},
};

static PyType_Spec spec = {
    .name = "commprof.nccl._scanner.Scanner",
    .basicsize = sizeof(Scanner),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

static int
execute(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    int failed = type == NULL || PyModule_AddObjectRef(module, "Scanner", type) < 0;
    Py_XDECREF(type);
    return failed || PyModule_AddIntMacro(module, VERSION) < 0 ? -1 : 0;
}

static PyMethodDef functions[] = {
    {"tally", tally, METH_VARARGS, tally_doc},
    {NULL},
};

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "commprof.nccl._scanner",
    .m_doc = "Finds the lines of NCCL logs and reads the numbers of operation lines.",
    .m_methods = functions,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__scanner(void)
{
    return PyModuleDef_Init(&module);
}
