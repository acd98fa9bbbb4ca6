/* Scores a text with an exported model, segment by segment, with nothing but TensorFlow's C library.
 *
 *   serve DIR TOKENS LABELS STATE NLL NEW_STATE ROWS SEGMENT < ids
 *
 * TOKENS ... NEW_STATE are the signature's tensors, as "name:index". The standard input holds int32 ids [ROWS, n + 1],
 * all of a row after one another. Prints the n nll of every row, a line for a segment and row, then the messages of
 * three bad requests, and the nll of the first segment again.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensorflow/c/c_api.h"

static TF_Graph *graph;
static TF_Session *session;
static TF_Status *status;

static void check(const char *what) {
  if (TF_GetCode(status) == TF_OK) return;
  fprintf(stderr, "%s: %s\n", what, TF_Message(status));
  exit(1);
}

static TF_Output find(const char *name) {
  char operation[256];
  const char *colon = strrchr(name, ':');
  snprintf(operation, sizeof operation, "%.*s", (int)(colon - name), name);
  TF_Output output = {TF_GraphOperationByName(graph, operation), atoi(colon + 1)};
  if (!output.oper) {
    fprintf(stderr, "no operation %s\n", operation);
    exit(1);
  }
  return output;
}

static TF_Tensor *segment(const int *ids, int rows, int stride, int start, int length) {
  int64_t shape[2] = {rows, length};
  TF_Tensor *tensor = TF_AllocateTensor(TF_INT32, shape, 2, sizeof(int) * rows * length);
  for (int row = 0; row < rows; ++row)
    memcpy((int *)TF_TensorData(tensor) + row * length, ids + row * stride + start, sizeof(int) * length);
  return tensor;
}

static TF_Tensor *zeros(const int64_t *shape, int rank) {
  size_t size = sizeof(float);
  for (int i = 0; i < rank; ++i) size *= shape[i];
  TF_Tensor *tensor = TF_AllocateTensor(TF_FLOAT, shape, rank, size);
  memset(TF_TensorData(tensor), 0, size);
  return tensor;
}

/* Runs a request, which leaves its status in `status`. */
static void run(TF_Output *inputs, TF_Tensor **values, TF_Output *outputs, TF_Tensor **results) {
  TF_SessionRun(session, NULL, inputs, values, 3, outputs, results, 2, NULL, 0, NULL, status);
}

static void print_nll(TF_Tensor *nll, int rows, int length) {
  for (int row = 0; row < rows; ++row)
    for (int i = 0; i < length; ++i)
      printf("%.6f%c", ((float *)TF_TensorData(nll))[row * length + i], i + 1 < length ? ' ' : '\n');
}

static void print_error(const char *what) {
  char message[160];
  snprintf(message, sizeof message, "%s", TF_Message(status));
  message[strcspn(message, "\n")] = 0;
  printf("%s: %s %s\n", what, TF_GetCode(status) == TF_INVALID_ARGUMENT ? "invalid argument" : "other code", message);
}

int main(int argc, char **argv) {
  if (argc != 9) return fprintf(stderr, "usage: see serve.c\n"), 2;
  int rows = atoi(argv[7]), step = atoi(argv[8]);
  static int ids[1 << 16];
  int stride = (int)(fread(ids, sizeof(int), 1 << 16, stdin) / rows);

  status = TF_NewStatus();
  graph = TF_NewGraph();
  const char *tags[] = {"serve"};
  TF_SessionOptions *options = TF_NewSessionOptions();
  session = TF_LoadSessionFromSavedModel(options, NULL, argv[1], tags, 1, graph, NULL, status);
  check("load");

  TF_Output inputs[3] = {find(argv[2]), find(argv[3]), find(argv[4])};
  TF_Output outputs[2] = {find(argv[5]), find(argv[6])};
  int rank = TF_GraphGetTensorNumDims(graph, inputs[2], status);
  int64_t shape[8];
  TF_GraphGetTensorShape(graph, inputs[2], shape, rank, status);
  check("shape of the state");
  shape[0] = rows;
  TF_Tensor *fresh = zeros(shape, rank), *state = fresh;

  for (int start = 0; start + 1 < stride; start += step) {
    int length = stride - 1 - start < step ? stride - 1 - start : step;
    TF_Tensor *values[3] = {segment(ids, rows, stride, start, length),
                            segment(ids, rows, stride, start + 1, length), state};
    TF_Tensor *results[2];
    run(inputs, values, outputs, results);
    check("score");
    print_nll(results[0], rows, length);
    state = results[1];
  }

  TF_Tensor *good = segment(ids, rows, stride, 0, step), *bad = segment(ids, rows, stride, 0, step);
  TF_Tensor *labels = segment(ids, rows, stride, 1, step), *short_labels = segment(ids, rows, stride, 1, step - 1);
  ((int *)TF_TensorData(bad))[0] = 1 << 30;
  int64_t other_shape[8];
  memcpy(other_shape, shape, sizeof shape);
  other_shape[rank - 2] += 1;
  other_shape[1] += 1;
  TF_Tensor *other = zeros(other_shape, rank), *results[2];

  TF_Tensor *bad_id[3] = {bad, labels, fresh}, *bad_labels[3] = {good, short_labels, fresh};
  TF_Tensor *bad_state[3] = {good, labels, other};
  run(inputs, bad_id, outputs, results);
  print_error("id");
  run(inputs, bad_labels, outputs, results);
  print_error("labels");
  run(inputs, bad_state, outputs, results);
  print_error("state");

  TF_Tensor *values[3] = {good, labels, fresh};
  run(inputs, values, outputs, results);
  check("score again");
  print_nll(results[0], rows, step);
  return 0;
}
